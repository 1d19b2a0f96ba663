"""Muon on whole tensors. The ids (C1, B69 …) are those of the invariants and cases lists."""

import copy
import itertools
import logging
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from isoloco.fleet import SoloFleet
from isoloco.muon import SCALES, Muon
from isoloco.newton_schulz import newton_schulz
from tests.unit.isoloco.toy_replica import SAMPLES_PER_STEP, ToyReplica, make_round, train

SHAPES = {
    "tok_embeddings.weight": (12, 5),
    "layers.0.up.weight": (24, 8),
    "layers.0.down.weight": (8, 24),
    "layers.0.square.weight": (8, 8),
    "layers.0.row.weight": (1, 9),
    "layers.0.column.weight": (9, 1),
    "layers.0.norm.weight": (7,),
    "layers.0.experts": (3, 6, 4),
    "output.weight": (12, 5),
}
HIDDEN = ("layers.0.up.weight", "layers.0.down.weight", "layers.0.square.weight")
OTHERS = tuple(name for name in SHAPES if name not in HIDDEN)


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor) for name, tensor in tensors(seed, dtype).items()}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def take_steps(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for name, gradient in tensors(seed).items():
            if name in named:
                named[name].grad = gradient.to(named[name].dtype)
        optimizer.step()


def well_conditioned(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix with singular values from 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    U, _, Vt = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    return U @ torch.diag(torch.linspace(3, 1, min(rows, columns))) @ Vt


def update_of(gradient: Tensor, **options) -> Tensor:
    """What one step with lr = 1 and without decay subtracts from a hidden matrix."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = Muon([("layers.0.weight", weight)], **({"lr": 1.0, "weight_decay": 0.0} | options))
    weight.grad = gradient.clone()
    optimizer.step()
    return -weight.detach()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# ---- hidden matrices ----


@pytest.mark.parametrize(("rows", "columns"), [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize(
    ("scale", "size"),
    [
        ("spectral", lambda rows, columns: math.sqrt(rows / columns)),
        ("match_rms_adamw", lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))),
        ("original", lambda rows, columns: math.sqrt(max(1, rows / columns))),
    ],
)
def test_all_singular_values_of_an_update_are_the_scale(rows: int, columns: int, scale: str, size) -> None:
    """C1, B69: lr · s · [0.97, 1.04]."""
    update = update_of(well_conditioned(rows, columns), lr=0.3, scale=scale)
    values = torch.linalg.svdvals(update) / (0.3 * size(rows, columns))
    assert 0.97 < values.min() <= values.max() < 1.04


@pytest.mark.parametrize("factor", [1e-20, 1e-6, 1e3, 1e20])
def test_the_size_of_the_gradient_does_not_matter(factor: float) -> None:
    """C1."""
    gradient = well_conditioned(24, 8)
    assert relative_error(update_of(factor * gradient), update_of(gradient)) < 1e-5


@pytest.mark.parametrize(("scale", "nesterov"), itertools.product(SCALES, (False, True)))
def test_the_trajectory_is_that_of_the_formulas(scale: str, nesterov: bool) -> None:
    """M ← μM + G; U = M or G + μM; W ← (1 − lr·wd) W; W ← W − lr · s · NS(U). Six steps, fp64, 1e-6."""
    named = parameters()
    expected = {name: named[name].detach().double() for name in HIDDEN}
    momentum = {name: torch.zeros_like(expected[name]) for name in HIDDEN}
    optimizer = Muon(named.items(), lr=0.02, momentum=0.8, weight_decay=0.1, scale=scale, nesterov=nesterov)
    for seed in range(1, 7):
        take_steps(named, optimizer, [seed])
        for name in HIDDEN:
            G = tensors(seed)[name].double()
            momentum[name] = 0.8 * momentum[name] + G
            U = G + 0.8 * momentum[name] if nesterov else momentum[name]
            W = (1 - 0.02 * 0.1) * expected[name]
            expected[name] = W - 0.02 * SCALES[scale](*W.shape) * newton_schulz(U)
    for name in HIDDEN:
        assert relative_error(named[name].detach(), expected[name]) < 1e-6
        assert relative_error(optimizer.state[named[name]]["momentum_buffer"], momentum[name]) < 1e-6


@pytest.mark.parametrize(
    ("scale", "nesterov"), itertools.product(("original", "match_rms_adamw"), (False, True)), ids=str
)
def test_directions_are_those_of_torch_muon(scale: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch averages the gradients where we add them up, which makes no difference to the direction: 1e-5 of what four
    steps did, once it does not round to bfloat16."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    ours, theirs, start = parameters(), parameters(), parameters()
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    take_steps(ours, Muon(ours.items(), coefficients="muon", scale=scale, **options), range(1, 5))
    hidden = {name: theirs[name] for name in HIDDEN}
    take_steps(hidden, torch.optim.Muon(hidden.values(), adjust_lr_fn=scale, **options), range(1, 5))
    for name in HIDDEN:
        done = [(after[name] - start[name]).detach() for after in (ours, theirs)]
        assert relative_error(*done) < 1e-5


def test_decay_has_the_plain_learning_rate_and_comes_before_the_update() -> None:
    """C2: exact."""
    weight = nn.Parameter(well_conditioned(24, 8, seed=1))
    before = weight.detach().clone()
    optimizer = Muon([("layers.0.weight", weight)], lr=0.3, weight_decay=0.2)
    weight.grad = well_conditioned(24, 8)
    optimizer.step()
    assert torch.equal(weight, before * (1 - 0.3 * 0.2) - update_of(weight.grad) * 0.3)


@pytest.mark.parametrize("gradient", [torch.zeros(6, 4), torch.outer(torch.ones(6), torch.arange(4.0))])
def test_a_zero_or_deficient_gradient_gives_a_finite_update_in_its_own_directions(gradient: Tensor) -> None:
    update = update_of(gradient, scale="spectral")
    rank = int(torch.linalg.matrix_rank(gradient))
    values = torch.linalg.svdvals(update) / math.sqrt(6 / 4)
    assert values[:rank] == pytest.approx(torch.ones(rank), abs=0.04)
    assert values[rank:] == pytest.approx(torch.zeros(4 - rank), abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_spoils_its_own_matrix_and_no_other(bad: float) -> None:
    named = parameters()
    optimizer = Muon(named.items())
    for name, gradient in tensors(1).items():
        named[name].grad = gradient
    named["layers.0.up.weight"].grad[3, 2] = bad
    optimizer.step()
    assert bool(named["layers.0.up.weight"].isnan().all())
    assert all(bool(parameter.isfinite().all()) for name, parameter in named.items() if name != "layers.0.up.weight")


def test_matrices_of_equal_shape_do_not_see_each_other() -> None:
    gradients = [well_conditioned(24, 8, seed) for seed in range(3)]
    weights = [nn.Parameter(torch.zeros(24, 8)) for _ in gradients]
    optimizer = Muon([(f"layers.{i}.weight", weight) for i, weight in enumerate(weights)], lr=1.0, weight_decay=0.0)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    assert all(
        torch.equal(-weight.detach(), update_of(gradient)) for weight, gradient in zip(weights, gradients, strict=True)
    )


def test_blocks_of_rows_are_matrices_of_their_own_where_named() -> None:
    gradient = torch.cat([well_conditioned(8, 6, seed=1), 100 * well_conditioned(4, 6, seed=2)])
    parts = [update_of(block) for block in gradient.split((8, 4))]
    assert torch.equal(update_of(gradient, split_sizes={"layers.*.weight": (8, 4)}), torch.cat(parts))
    assert relative_error(update_of(gradient), torch.cat(parts)) > 0.1


def test_stacks_are_matrices_of_their_own_where_named() -> None:
    stack = torch.stack([well_conditioned(8, 6, seed) * 10**seed for seed in range(3)])
    expected = torch.stack([update_of(matrix) for matrix in stack])
    assert torch.equal(update_of(stack, stacks=["layers.*"]), expected)
    split = torch.stack([update_of(matrix, split_sizes={"*": [5, 3]}) for matrix in stack])
    assert torch.equal(update_of(stack, stacks=["layers.*"], split_sizes={"*": [5, 3]}), split)


# ---- everything else ----


@pytest.mark.parametrize("implementation", [None, "fused", "foreach", "for-loop"])
def test_embeddings_heads_and_vectors_get_adamw(implementation: str | None) -> None:
    """C2: bit for bit, five steps, with a learning rate that changes."""
    ours, theirs = parameters(), parameters()
    muon = Muon(
        ours.items(),
        lr=0.01,
        weight_decay=0.1,
        adamw_betas=(0.8, 0.9),
        adamw_eps=1e-6,
        adamw_lr_factor=0.5,
        adamw_implementation=implementation,
    )
    flags = {} if implementation is None else {name: implementation == name for name in ("fused", "foreach")}
    others = {name: theirs[name] for name in OTHERS}
    adamw = torch.optim.AdamW(others.values(), lr=0.005, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, **flags)
    for step in range(5):
        muon.param_groups[0]["lr"] = 0.01 / (1 + step)
        adamw.param_groups[0]["lr"] = 0.01 / (1 + step) * 0.5
        take_steps(ours, muon, [step])
        take_steps(others, adamw, [step])
    for name in OTHERS:
        assert torch.equal(ours[name], theirs[name])
        assert muon.state[ours[name]].keys() == adamw.state[theirs[name]].keys()
        for key, value in adamw.state[theirs[name]].items():
            assert torch.equal(muon.state[ours[name]][key], value)


def hidden_names(optimizer: Muon, named: dict[str, nn.Parameter]) -> list[str]:
    return [name for name, parameter in named.items() if "momentum_buffer" in optimizer.state[parameter]]


def test_what_is_orthogonalised_is_chosen_by_shape_and_name() -> None:
    named = parameters()
    assert hidden_names(Muon(named.items()), named) == list(HIDDEN)


def test_explicit_patterns_replace_the_choice_by_name() -> None:
    named = parameters()
    of_tables = ["tok_embeddings.weight", "output.weight"]
    assert hidden_names(Muon(named.items(), adamw=()), named) == sorted([*HIDDEN, *of_tables], key=list(SHAPES).index)
    assert hidden_names(Muon(named.items(), adamw=["layers.0.*"]), named) == of_tables
    assert hidden_names(Muon(named.items(), stacks=["*.experts"]), named) == [*HIDDEN, "layers.0.experts"]


def test_what_became_of_each_parameter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """B69."""
    named = {"tok_embeddings.weight": nn.Parameter(torch.ones(8, 4))}
    for layer in ("layers.0", "layers.1"):
        named[f"{layer}.qkv.weight"] = nn.Parameter(torch.ones(12, 4))
        named[f"{layer}.norm.weight"] = nn.Parameter(torch.ones(4))
        named[f"{layer}.experts"] = nn.Parameter(torch.ones(5, 4, 4))
    with caplog.at_level(logging.INFO, logger="isoloco"):
        Muon(named.items(), split_sizes={"*.qkv.weight": (4, 4, 4)}, stacks=["*.experts"])
    assert caplog.messages == [
        "Muon: 16 matrices in 4 parameters are orthogonalised; AdamW updates 3 parameters: "
        "tok_embeddings.weight, layers.*.norm.weight (2)"
    ]


# ---- parameters that are special ----


@pytest.mark.parametrize("name", ["layers.0.up.weight", "output.weight"])
def test_a_parameter_without_gradient_is_left_alone(name: str) -> None:
    named, others = parameters(), parameters()
    optimizer, other = Muon(named.items()), Muon([(each, others[each]) for each in SHAPES if each != name])
    del others[name]
    before = named[name].detach().clone()
    for seed in (1, 2):
        for each, gradient in tensors(seed).items():
            named[each].grad = None if each == name else gradient
        optimizer.step()
    take_steps(others, other, (1, 2))
    assert torch.equal(named[name], before)
    assert not any(tensor.any() for tensor in optimizer.state[named[name]].values())
    assert all(torch.equal(named[each], others[each]) for each in others)


def test_a_parameter_that_is_used_late_starts_like_any_other() -> None:
    named, fresh = parameters(), parameters()
    optimizer = Muon(named.items())
    optimizer.step()
    take_steps(named, optimizer, [1])
    take_steps(fresh, Muon(fresh.items()), [1])
    assert all(torch.equal(named[name], fresh[name]) for name in SHAPES)


def test_frozen_parameters_have_no_state_until_they_are_trained() -> None:
    named = parameters()
    frozen = ("layers.0.up.weight", "output.weight")
    for name in frozen:
        named[name].requires_grad_(False)
    optimizer = Muon(named.items())
    assert [name for name in SHAPES if named[name] not in optimizer.state] == list(frozen)
    assert len(optimizer.state_dict()["state"]) == len(SHAPES) - len(frozen)
    for name in frozen:
        named[name].requires_grad_(True)
    fresh = parameters()
    take_steps(named, optimizer, [1])
    take_steps(fresh, Muon(fresh.items()), [1])
    assert all(torch.equal(named[name], fresh[name]) for name in SHAPES)


def test_a_tied_weight_is_one_parameter_and_an_embedding_under_any_of_its_names() -> None:
    tied = nn.Parameter(torch.ones(12, 5))
    named = [("layers.0.copy.weight", tied), ("tok_embeddings.weight", tied)]
    optimizer = Muon(named)
    assert optimizer.param_groups[0]["params"] == [tied]
    assert optimizer.state[tied].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state.keys() == Muon(reversed(named)).state.keys() == {tied}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_rounded_once_and_have_fp32_state(dtype: torch.dtype) -> None:
    """B72: as if fp32 copies were trained for a step."""
    named = parameters(dtype=dtype)
    wide = {name: nn.Parameter(parameter.detach().float()) for name, parameter in named.items()}
    optimizer, reference = Muon(named.items()), Muon(wide.items())
    for name, gradient in tensors(1, dtype).items():
        named[name].grad, wide[name].grad = gradient, gradient.float()
    optimizer.step()
    reference.step()
    for name, parameter in named.items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, wide[name].to(dtype))
        for key, value in reference.state[wide[name]].items():
            assert optimizer.state[parameter][key].dtype == torch.float32
            assert torch.equal(optimizer.state[parameter][key], value)


def test_fp64_parameters_are_trained_in_fp64() -> None:
    gradient = well_conditioned(24, 8).double()
    assert update_of(gradient).dtype == torch.float64
    assert relative_error(update_of(gradient), math.sqrt(3) * newton_schulz(gradient)) < 1e-14


# ---- the optimizer protocol ----


def test_a_schedule_sets_one_learning_rate_for_all() -> None:
    named = parameters()
    optimizer = Muon(named.items(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    take_steps(named, optimizer, [1])
    schedule.step()
    before = copy.deepcopy(named)
    take_steps(named, optimizer, [2])
    assert all(torch.equal(named[name], before[name]) for name in SHAPES)


def test_the_closure_is_evaluated_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([("layers.0.weight", weight)])

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16
    assert not torch.equal(weight, torch.ones(4, 4))


# ---- state ----


def test_state_is_there_before_the_first_step_under_names_that_say_what_it_is() -> None:
    named = parameters()
    optimizer = Muon(named.items())
    for name, parameter in named.items():
        expected = {"momentum_buffer"} if name in HIDDEN else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == expected
        assert not any(tensor.any() for tensor in optimizer.state[parameter].values())
        assert all(tensor.shape in (parameter.shape, ()) for tensor in optimizer.state[parameter].values())


def test_state_that_was_cleared_starts_over() -> None:
    named = parameters()
    optimizer = Muon(named.items())
    take_steps(named, optimizer, (1, 2))
    optimizer.state.clear()
    fresh = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    assert all(not state["exp_avg"].any() for state in optimizer.state_dict()["state"].values() if "exp_avg" in state)
    take_steps(named, optimizer, (3, 4))
    take_steps(fresh, Muon(fresh.items()), (3, 4))
    assert all(torch.equal(named[name], fresh[name]) for name in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    """torch alone would round the state to the dtype of the parameters."""
    named = parameters(dtype=dtype)
    optimizer = Muon(named.items(), lr=0.05, momentum=0.7)
    take_steps(named, optimizer, (1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    others = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    other = Muon(others.items())
    own = [tensor for state in other.state.values() for tensor in state.values()]
    other.load_state_dict(saved)
    assert all(a is b for a, b in zip(own, (t for s in other.state.values() for t in s.values()), strict=True))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.05, 0.7)
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            assert other.state[others[name]][key].dtype == torch.float32
            assert torch.equal(other.state[others[name]][key], value)
    take_steps(named, optimizer, (3, 4))
    take_steps(others, other, (3, 4))
    assert all(torch.equal(named[name], others[name]) for name in SHAPES)


def test_a_state_dict_of_something_else_is_refused_and_changes_nothing() -> None:
    """B48: a parameter without its state is named."""
    named = parameters()
    optimizer = Muon(named.items(), lr=0.05)
    take_steps(named, optimizer, [1])
    before = copy.deepcopy(optimizer.state_dict())
    incomplete = copy.deepcopy(before)
    del incomplete["state"][list(SHAPES).index("layers.0.norm.weight")]
    incomplete["param_groups"][0]["lr"] = 1.0
    with pytest.raises(ValueError, match=r"no exp_avg, exp_avg_sq, step for layers\.0\.norm\.weight \(it has not"):
        optimizer.load_state_dict(incomplete)
    another_choice = Muon(parameters().items(), adamw=["tok_embeddings.*", "output.*", "layers.0.up.*"])
    with pytest.raises(ValueError, match=r"no momentum_buffer for layers\.0\.up\.weight \(it has exp_avg, "):
        optimizer.load_state_dict(another_choice.state_dict())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(Muon(list(named.items())[:-1]).state_dict() | {"state": before["state"]})
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in state.items())


# ---- inside an outer round ----


def muon_inside(parameters: Sequence[Tensor]) -> Muon:
    names = ("layers.0.weight", "gain", "bias")
    return Muon(zip(names, parameters, strict=True), lr=0.05, weight_decay=0.1)


def test_a_round_after_every_step_is_plain_muon() -> None:
    """C3: H = 1, R = 1, μ = 0, η = 1. 1e-6."""
    replica, alone = ToyReplica(muon_inside), ToyReplica(muon_inside)
    outer = make_round(SoloFleet(), [replica], sync_steps=1, lr=1.0, momentum=0.0)
    train(outer, [replica])
    for step in range(6):
        alone.learn(replica.seen[step * SAMPLES_PER_STEP : (step + 1) * SAMPLES_PER_STEP])
    assert len(replica.seen) == 6 * SAMPLES_PER_STEP
    for name, value in alone.values().items():
        torch.testing.assert_close(replica.values()[name], value, rtol=1e-6, atol=1e-6)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"adamw_betas": (0.9, 1.0)}, "adamw_betas=1.0"),
        ({"adamw_eps": 0.0}, "adamw_eps=0.0"),
        ({"adamw_lr_factor": math.inf}, "adamw_lr_factor=inf"),
        ({"adamw_implementation": "fast"}, "adamw_implementation='fast' is unknown: use one of None, 'fused'"),
        ({"scale": "rms"}, "scale='rms' is unknown: use one of 'spectral', 'match_rms_adamw', 'original'"),
        ({"coefficients": "kj"}, "coefficients='kj' is unknown"),
        ({"steps": 6}, "only 5"),
        ({"adamw": ["embedding"]}, "adamw: 'embedding' matches no parameter; nearest: tok_embeddings.weight"),
        ({"adamw": "output.weight"}, r"such as \['output.weight'\]"),
        ({"stacks": ["experts"]}, "stacks: 'experts' matches no parameter"),
        ({"stacks": ["layers.0.up.weight"]}, "stacks: 'layers.0.up.weight' has the shape"),
        ({"stacks": ["*.experts"], "adamw": ["*.experts"]}, "stacks: layers.0.experts of shape .* AdamW updates it"),
        ({"split_sizes": {"up": (12, 12)}}, "split_sizes: 'up' matches no parameter"),
        ({"split_sizes": {"*.up.weight": (12, 11)}}, r"split_sizes: \[12, 11\] does not split the 24 rows"),
        ({"split_sizes": {"output.weight": (6, 6)}}, "split_sizes: output.weight of shape .* AdamW updates it"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters().items(), **options)


def test_parameters_that_cannot_be_trained_are_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="given twice"):
        Muon([("a", weight), ("a", nn.Parameter(torch.ones(4, 4)))])
    with pytest.raises(ValueError, match=r"a is torch\.complex64"):
        Muon([("a", nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)))])
    with pytest.raises(ValueError, match="one group of parameters"):
        Muon([("a", weight)]).add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_sparse_gradient_is_refused_before_anything_is_changed() -> None:
    embedding, hidden = nn.Embedding(6, 4, sparse=True), nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([("layers.0.weight", hidden), ("tok_embeddings.weight", embedding.weight)])
    (embedding(torch.tensor([1, 2])) @ hidden).sum().backward()
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight: its gradient is sparse"):
        optimizer.step()
    assert torch.equal(hidden, torch.ones(4, 4))
    assert not optimizer.state[hidden]["momentum_buffer"].any()


def test_copies_go_on_by_themselves_and_plain_parameters_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    optimizer = Muon(module.named_parameters(), adamw=["1.weight"])
    duplicate = copy.deepcopy(optimizer)
    for each in (optimizer, duplicate):
        for number, parameter in enumerate(each.param_groups[0]["params"]):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        each.step()
    for mine, theirs in zip(optimizer.param_groups[0]["params"], duplicate.param_groups[0]["params"], strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        Muon(torch.nn.Linear(4, 2).parameters())  # type: ignore[arg-type]
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["momentum_buffer"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"momentum_buffer of 0\.weight has the shape"):
        optimizer.load_state_dict(state)
