"""The outer step on whole tensors. The ids (D3, I15 …) are those of the invariants list."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch

from isoloco.isotropic import isotropic
from isoloco.outer_optimizer import OuterOptimizer

Named = dict[str, torch.Tensor]

SHAPES = {
    "embedding.weight": (12, 5),
    "layer.weight": (6, 9),
    "row.weight": (1, 9),
    "norm.weight": (7,),
    "experts": (2, 4, 3),
}
MATRICES = ("embedding.weight", "layer.weight")


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def set_gradients(parameters: Named, gradients: Named) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()


def run(num_rounds: int = 3, dtype: torch.dtype = torch.float32, **options) -> tuple[Named, OuterOptimizer]:
    """Parameters and optimizer after rounds with fixed pseudo-gradients."""
    parameters = tensors(seed=0, dtype=dtype)
    optimizer = OuterOptimizer(parameters.items(), **({"lr": 0.7} | options))
    for index in range(num_rounds):
        set_gradients(parameters, tensors(seed=1 + index, dtype=dtype))
        optimizer.step()
    return parameters, optimizer


def assert_equal(actual: Named, expected: Named) -> None:
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def golden_trajectory(**options) -> list[float]:
    theta = torch.tensor([1.0], dtype=torch.float64)
    optimizer = OuterOptimizer([("theta", theta)], lr=0.7, momentum=0.9, **options)
    trajectory = []
    for delta in (0.1, 0.2, -0.05):
        theta.grad = torch.tensor([delta], dtype=torch.float64)
        optimizer.step()
        trajectory.append(theta.item())
    return trajectory


def test_nesterov_is_that_of_torch_sgd() -> None:
    """D3: six rounds against torch.optim.SGD(nesterov=True). 1e-6."""
    ours, _ = run(num_rounds=6, momentum=0.9)
    theirs = tensors(seed=0)
    sgd = torch.optim.SGD(theirs.values(), lr=0.7, momentum=0.9, nesterov=True)
    for index in range(6):
        set_gradients(theirs, tensors(seed=1 + index))
        sgd.step()
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def test_golden_scalars() -> None:
    """D4: Δ = (.1, .2, −.05), μ = .9, η = .7, θ = 1. 1e-12 in fp64."""
    assert golden_trajectory() == pytest.approx([0.867, 0.5443, 0.44637], abs=1e-12)
    assert golden_trajectory(momentum_kind="heavy_ball") == pytest.approx([0.93, 0.727, 0.5793], abs=1e-12)
    # A.3: equal to heavy-ball as long as the learning rate is constant
    assert golden_trajectory(momentum_kind="momentum") == pytest.approx([0.93, 0.727, 0.5793], abs=1e-12)


def test_nesterov_is_mulocos_form_for_a_constant_learning_rate() -> None:
    """D5: u ← μu + ηΔ; θ ← θ − μu − ηΔ. 1e-12 in fp64."""
    ours, _ = run(num_rounds=4, dtype=torch.float64, momentum=0.8)
    theta = tensors(seed=0, dtype=torch.float64)
    u = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for index in range(4):
        for name, delta in tensors(seed=1 + index, dtype=torch.float64).items():
            u[name] = 0.8 * u[name] + 0.7 * delta
            theta[name] = theta[name] - 0.8 * u[name] - 0.7 * delta
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theta[name], rtol=0, atol=1e-12)


def test_heavy_ball_and_momentum_part_when_the_learning_rate_changes() -> None:
    """A.3: the learning rate is inside the heavy-ball buffer, outside the momentum buffer."""
    results = {}
    for kind in ("momentum", "heavy_ball"):
        theta = torch.tensor([1.0], dtype=torch.float64)
        optimizer = OuterOptimizer([("theta", theta)], lr=1.0, momentum=0.5, momentum_kind=kind)
        for lr in (1.0, 0.1):
            optimizer.param_groups[0]["lr"] = lr
            theta.grad = torch.tensor([1.0], dtype=torch.float64)
            optimizer.step()
        results[kind] = theta.item()
    # momentum: 1 − 1·1 − 0.1·1.5; heavy ball: 1 − 1 − (0.5·1 + 0.1·1)
    assert results == pytest.approx({"momentum": -0.15, "heavy_ball": -0.6}, abs=1e-12)


def test_sgd_with_unit_rate_averages_the_parameters() -> None:
    """D1, D6: η = 1, μ = 0 moves θ to the mean of the θ_i. 1e-6."""
    theta = tensors(seed=0)
    replicas = [tensors(seed=10 + index) for index in range(3)]
    mean = {name: sum(replica[name] for replica in replicas) / 3 for name in SHAPES}
    set_gradients(theta, {name: sum(theta[name] - replica[name] for replica in replicas) / 3 for name in SHAPES})
    OuterOptimizer(theta.items(), lr=1.0, momentum=0.0).step()
    for name in SHAPES:
        torch.testing.assert_close(theta[name], mean[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [None, "svd", "newton_schulz"])
@pytest.mark.parametrize("momentum_kind", ["nesterov", "momentum", "heavy_ball"])
def test_step_is_odd_in_the_pseudo_gradient(method: str | None, momentum_kind: str) -> None:
    """D9: from θ = 0, negating every Δ negates θ, bit for bit; so the sign convention cannot matter."""
    results = []
    for sign in (1, -1):
        theta = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        optimizer = OuterOptimizer(theta.items(), lr=0.7, momentum_kind=momentum_kind, isotropic=method)
        for index in range(3):
            set_gradients(theta, {name: sign * delta for name, delta in tensors(seed=1 + index).items()})
            optimizer.step()
        results.append({name: sign * value for name, value in theta.items()})
    assert_equal(results[0], results[1])


def test_positive_pseudo_gradient_is_subtracted() -> None:
    """A.1: Δ = θ_old − θ_i, so the step goes to where the replicas went."""
    theta = torch.zeros(3)
    theta.grad = torch.ones(3)
    OuterOptimizer([("theta", theta)], lr=0.5, momentum=0.0).step()
    assert theta.tolist() == [-0.5] * 3


@pytest.mark.parametrize("method", ["svd", "newton_schulz"])
def test_without_momentum_isoloco_is_sgd_on_the_isotropic_mean(method: str) -> None:
    """I15: μ = 0; and correcting gradient or update is the same then. Bit for bit."""
    parameters, _ = run(num_rounds=1, momentum=0.0, isotropic=method, scale="rms")
    expected, deltas = tensors(seed=0), tensors(seed=1)
    for name in SHAPES:
        delta = isotropic(deltas[name], orthogonalizer=method, scale="rms") if name in MATRICES else deltas[name]
        expected[name] = expected[name] - delta * 0.7
    assert_equal(parameters, expected)
    of_update, _ = run(num_rounds=1, momentum=0.0, isotropic=method, scale="rms", target="update")
    assert_equal(of_update, expected)


def test_gradient_and_update_targets_differ_with_momentum() -> None:
    """B.3: the update is orthogonalised after momentum on the raw mean, so the buffer holds raw means."""
    _, of_gradient = run(isotropic="svd", momentum=0.8)
    parameters, of_update = run(isotropic="svd", momentum=0.8, target="update")
    expected = tensors(seed=0)
    for name in SHAPES:
        buffer = torch.zeros(SHAPES[name])
        for index in range(3):
            delta = tensors(seed=1 + index)[name]
            buffer = 0.8 * buffer + delta
            update = delta + 0.8 * buffer
            expected[name] = expected[name] - 0.7 * (isotropic(update) if name in MATRICES else update)
        torch.testing.assert_close(parameters[name], expected[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_update.state[parameters[name]]["momentum_buffer"], buffer, rtol=1e-5, atol=1e-5)
    other = [state["momentum_buffer"] for state in of_gradient.state.values()]
    assert not torch.allclose(of_update.state[parameters["layer.weight"]]["momentum_buffer"], other[1])


def test_heavy_ball_update_is_orthogonalised_with_its_learning_rate() -> None:
    parameters, _ = run(num_rounds=1, isotropic="svd", momentum=0.8, momentum_kind="heavy_ball", target="update")
    start, delta = tensors(seed=0)["layer.weight"], tensors(seed=1)["layer.weight"]
    torch.testing.assert_close(parameters["layer.weight"], start - 0.7 * isotropic(delta), rtol=1e-5, atol=1e-6)


def test_without_matrices_isoloco_is_diloco() -> None:
    """I16: tensors that do not have exactly two dims, both above one, take the plain mean. Bit for bit."""
    diloco, _ = run()
    isoloco, _ = run(isotropic="svd")
    for name in SHAPES:
        assert torch.equal(isoloco[name], diloco[name]) == (name not in MATRICES), name


@pytest.mark.parametrize("exclude", [["*"], ["embedding.weight", "layer.weight"], ["*.weight"]])
def test_excluding_all_matrices_is_diloco(exclude: list[str]) -> None:
    """I16: bit for bit."""
    diloco, _ = run()
    excluding, _ = run(isotropic="svd", exclude=exclude)
    assert_equal(excluding, diloco)


def test_exclusion_by_exact_name_leaves_the_others_in() -> None:
    diloco, _ = run()
    isoloco, _ = run(isotropic="svd")
    excluding, _ = run(isotropic="svd", exclude=["embedding.weight"])
    assert torch.equal(excluding["embedding.weight"], diloco["embedding.weight"])
    assert torch.equal(excluding["layer.weight"], isoloco["layer.weight"])


def test_exclusion_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"'embeding\.weight' matches no parameter; nearest: embedding\.weight"):
        run(isotropic="svd", exclude=["embeding.weight"])
    with pytest.raises(ValueError, match="sequence of names"):
        run(isotropic="svd", exclude="embedding.weight")


def test_first_round_applies_one_plus_momentum_times_the_isotropic_mean() -> None:
    """I17: P = (1 + μ) Iso(Δ). 1e-6."""
    parameters, _ = run(num_rounds=1, isotropic="svd", momentum=0.8)
    start, deltas = tensors(seed=0), tensors(seed=1)
    for name in MATRICES:
        expected = start[name] - 0.7 * 1.8 * isotropic(deltas[name])
        torch.testing.assert_close(parameters[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [None, "svd", "newton_schulz"])
@pytest.mark.parametrize("target", ["gradient", "update"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_non_finite_pseudo_gradient_changes_nothing(method: str | None, target: str, name: str) -> None:
    """I18: the tensor is named; neither θ nor the momentum of any tensor is touched."""
    parameters, optimizer = run(isotropic=method, target=target)
    before = copy.deepcopy([parameters, [state["momentum_buffer"] for state in optimizer.state.values()]])
    deltas = tensors(seed=9)
    deltas[name].view(-1)[-1] = float("nan")
    set_gradients(parameters, deltas)
    with pytest.raises(ValueError, match=f"{name}: non-finite"):
        optimizer.step()
    assert_equal(parameters, before[0])
    for state, buffer in zip(optimizer.state.values(), before[1], strict=True):
        assert torch.equal(state["momentum_buffer"], buffer)


@pytest.mark.parametrize("method", [None, "svd", "newton_schulz"])
def test_zero_pseudo_gradient_leaves_the_parameters(method: str | None) -> None:
    """I18: zero → zero."""
    parameters = tensors(seed=0)
    set_gradients(parameters, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    OuterOptimizer(parameters.items(), lr=0.7, isotropic=method).step()
    assert_equal(parameters, tensors(seed=0))


@pytest.mark.parametrize(
    ("momentum_kind", "momentum"), [("nesterov", 0.9), ("momentum", 0.9), ("heavy_ball", 0.9), ("nesterov", 0.0)]
)
def test_every_product_and_sum_is_rounded_by_itself(momentum_kind: str, momentum: float) -> None:
    """Bits equal numpy's fp32, which has no fused multiply-add: machines of all kinds compute the same θ."""
    size = 100_000
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(size, generator=generator)
    lr, mu = np.float32(0.7), np.float32(momentum)
    expected, buffer = theta.numpy().copy(), np.zeros(size, np.float32)
    optimizer = OuterOptimizer([("theta", theta)], lr=0.7, momentum=momentum, momentum_kind=momentum_kind)
    for _ in range(3):
        theta.grad = torch.randn(size, generator=generator)
        delta = theta.grad.numpy()
        if momentum_kind == "heavy_ball":
            buffer = buffer * mu - delta * lr
            expected = expected + buffer
        else:
            buffer = buffer * mu + delta
            update = delta + buffer * mu if momentum_kind == "nesterov" else buffer
            expected = expected - update * lr
        optimizer.step()
        assert np.array_equal(theta.numpy().view(np.int32), expected.view(np.int32))


def test_state_is_fp32_whatever_the_parameters() -> None:
    """bf16 parameters and pseudo-gradients: momentum accumulates what bf16 would lose."""
    parameters = {"theta": torch.zeros(4, dtype=torch.bfloat16)}
    optimizer = OuterOptimizer(parameters.items(), lr=1.0, momentum=0.9, momentum_kind="momentum")
    buffer = optimizer.state[parameters["theta"]]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    for value in (1.0, 2.0**-10):
        parameters["theta"].grad = torch.full((4,), value, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(buffer, torch.full((4,), 0.9 + 2.0**-10), rtol=1e-6, atol=0)
    assert parameters["theta"].dtype == torch.bfloat16


def test_state_exists_from_the_start_except_without_momentum() -> None:
    parameters = tensors(seed=0)
    with_momentum = OuterOptimizer(parameters.items(), lr=0.7, momentum=0.9)
    assert {name: with_momentum.state[tensor]["momentum_buffer"].shape for name, tensor in parameters.items()} == {
        name: torch.Size(shape) for name, shape in SHAPES.items()
    }
    assert all(not state["momentum_buffer"].any() for state in with_momentum.state.values())
    assert not OuterOptimizer(parameters.items(), lr=0.7, momentum=0.0).state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("momentum", "method"), itertools.product([0.0, 0.9], [None, "svd"]))
def test_resume_from_a_state_dict_is_bit_exact(dtype: torch.dtype, momentum: float, method: str | None) -> None:
    """D10 for the outer state: three rounds at once = two, save, load, one. The loaded state is a copy."""
    options = {"momentum": momentum, "isotropic": method, "dtype": dtype}
    straight, _ = run(num_rounds=3, **options)
    parameters, optimizer = run(num_rounds=2, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)

    resumed = {name: parameter.clone() for name, parameter in parameters.items()}
    other = OuterOptimizer(resumed.items(), lr=0.1, momentum=momentum, isotropic=method)
    other.load_state_dict(saved)
    set_gradients(resumed, tensors(seed=3, dtype=dtype))
    other.step()
    assert_equal(resumed, straight)
    for index, state in untouched["state"].items():
        assert torch.equal(saved["state"][index]["momentum_buffer"], state["momentum_buffer"])


def test_state_of_other_parameters_is_refused() -> None:
    _, optimizer = run()
    renamed = {name.replace("layer", "block"): tensor for name, tensor in tensors(seed=0).items()}
    other = OuterOptimizer(renamed.items(), lr=0.7)
    with pytest.raises(ValueError, match=r"block\.weight, layer\.weight"):
        other.load_state_dict(optimizer.state_dict())


def test_correct_and_apply_are_the_two_halves_of_a_step() -> None:
    """The round times them apart; corrected gradients are visible in between."""
    whole, _ = run(num_rounds=1, isotropic="svd")
    parameters = tensors(seed=0)
    optimizer = OuterOptimizer(parameters.items(), lr=0.7, isotropic="svd")
    set_gradients(parameters, tensors(seed=1))
    optimizer.correct()
    assert_equal(parameters, tensors(seed=0))
    for name, parameter in parameters.items():
        delta = tensors(seed=1)[name]
        assert torch.equal(parameter.grad, isotropic(delta) if name in MATRICES else delta)
    optimizer.apply()
    assert_equal(parameters, whole)


def test_options_reach_the_isotropic_map() -> None:
    for options in (
        {"scale": "spectral"},
        {"clip": "low"},
        {"isotropic": "newton_schulz", "coefficients": "muon", "scale": "rms"},
    ):
        options = {"isotropic": "svd"} | options
        parameters, _ = run(num_rounds=1, momentum=0.0, **options)
        method = options.pop("isotropic")
        corrected = isotropic(tensors(seed=1)["layer.weight"], orthogonalizer=method, **options)
        assert torch.equal(parameters["layer.weight"], tensors(seed=0)["layer.weight"] - corrected * 0.7)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    parameters = tensors(seed=0)
    optimizer = OuterOptimizer(parameters.items(), lr=0.7, isotropic="svd")
    parameters["layer.weight"].grad = tensors(seed=1)["layer.weight"]
    optimizer.step()
    changed = [name for name in SHAPES if not torch.equal(parameters[name], tensors(seed=0)[name])]
    assert changed == ["layer.weight"]


def test_trainable_parameters_of_a_module_work_as_they_are() -> None:
    module = torch.nn.Linear(3, 4)
    before = copy.deepcopy(module.state_dict())
    optimizer = OuterOptimizer(module.named_parameters(), lr=1.0, momentum=0.0)
    loss = optimizer.step(lambda: module(torch.ones(2, 3)).sum().backward())
    assert loss is None
    assert torch.equal(module.bias, before["bias"] - 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum_kind": "nestrov"}, "momentum_kind='nestrov'"),
        ({"isotropic": "qr"}, "'qr'"),
        ({"scale": "median"}, "scale='median'"),
        ({"target": "both"}, "target='both'"),
        ({"isotropic": "newton_schulz", "clip": "high"}, "clip='high'"),
        ({"coefficients": "dio"}, "coefficients='dio'"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(num_rounds=0, **options)


def test_names_are_unique_and_the_group_is_one() -> None:
    with pytest.raises(ValueError, match="given twice"):
        OuterOptimizer([("a", torch.zeros(2)), ("a", torch.zeros(2))], lr=1.0)
    _, optimizer = run(num_rounds=0)
    with pytest.raises(ValueError, match="one group"):
        optimizer.add_param_group({"params": [("late", torch.zeros(2))]})


def test_steep_but_full_spectra_lose_no_direction() -> None:
    """Condition 1e5: far above rounding, although below r · eps of the largest."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, 300, generator=generator, dtype=torch.float64))[0] for n in (300, 310))
    matrix = ((U * torch.logspace(0, -5, 300, dtype=torch.float64)) @ V.T).float()
    result = isotropic(matrix)
    assert torch.linalg.matrix_rank(result) == 300
    exact = isotropic(matrix.double())
    assert float((result - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_by_itself(make_copy) -> None:
    _, optimizer = run(num_rounds=1, isotropic="svd")
    duplicate = make_copy(optimizer)
    for each in (optimizer, duplicate):
        parameters = dict(zip(SHAPES, each.param_groups[0]["params"], strict=True))
        set_gradients(parameters, tensors(seed=5))
        each.step()
    for mine, theirs in zip(optimizer.param_groups[0]["params"], duplicate.param_groups[0]["params"], strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("spoil", ["missing", "shape"])
def test_state_that_does_not_fit_is_refused_before_anything_changes(spoil: str) -> None:
    parameters, optimizer = run(num_rounds=1)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.1
    if spoil == "missing":
        del state["state"][3]
    else:
        state["state"][3]["momentum_buffer"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"norm.weight"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.state[parameters["norm.weight"]]["momentum_buffer"].any()


@pytest.mark.parametrize(
    "parameters",
    [
        lambda module: module.parameters(),
        lambda module: [{"params": list(module.parameters())}],
        lambda module: [("weight", module.weight), ("tied", module.weight)],
    ],
)
@pytest.mark.parametrize("shape", [(3, 4), (4, 2)])
def test_what_are_no_named_parameters_is_refused_with_the_cure(parameters, shape: tuple[int, int]) -> None:
    """A weight with two rows unpacks as a pair, too."""
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        OuterOptimizer(parameters(torch.nn.Linear(*shape)), lr=1.0)


def test_sparse_pseudo_gradients_are_named() -> None:
    parameter = torch.zeros(3, 4)
    optimizer = OuterOptimizer([("table", parameter)], lr=1.0)
    parameter.grad = torch.zeros(3, 4).to_sparse()
    with pytest.raises(ValueError, match="table: its pseudo-gradient is sparse"):
        optimizer.step()


def test_an_unknown_orthogonalizer_is_named_by_its_own_option() -> None:
    with pytest.raises(ValueError, match="isotropic=True is unknown"):
        OuterOptimizer(tensors(seed=0).items(), lr=1.0, isotropic=True)  # type: ignore[arg-type]
