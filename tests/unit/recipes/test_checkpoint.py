"""Checkpoints of one group of one rank: what is whole, what is skipped and why, what comes back."""

import json

import pytest
import torch
import torch.distributed as dist

from recipes.checkpoint import CheckpointError, Checkpoints
from recipes.config import Optimizer
from recipes.inner_optimizer import build_inner_optimizer
from tests.run_ranks import free_port
from tests.training_run import wait_until


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_replica(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    outer = {
        "tensors": {f"reference.{name}": p.detach().clone() for name, p in model.named_parameters()},
        "record": {"round": seed, "run_id": "run"},
    }
    return model, optimizer, outer


@pytest.fixture
def checkpoints(tmp_path, group):
    def make(keep_latest_k=0, shapes=None):
        model, _, _ = make_replica(0)
        shapes = shapes or {name: list(p.shape) for name, p in model.named_parameters()}
        return Checkpoints(tmp_path / "checkpoint", 0, shapes=shapes, group=group, keep_latest_k=keep_latest_k)

    return make


def save(store, round_number):
    model, optimizer, outer = make_replica(round_number)
    store.save(round_number, outer, model, optimizer)
    store.wait()
    return model, optimizer, outer


def folder_of(store, round_number):
    return store._folder / f"round-{round_number}" / "replica_0"


def test_what_is_saved_comes_back_exactly(checkpoints):
    store = checkpoints()
    _, optimizer, outer = save(store, 3)
    generator = torch.get_rng_state()
    other_model, other_optimizer, other_outer = make_replica(8)
    loaded = store.load(3, other_outer, other_model, other_optimizer)
    assert torch.equal(torch.get_rng_state(), generator)
    assert loaded["record"] == outer["record"]
    assert all(torch.equal(loaded["tensors"][name], outer["tensors"][name]) for name in outer["tensors"])
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_the_bytes_on_disk_are_those_of_the_boundary_although_training_goes_on(checkpoints):
    """Case B50: reference parameters live on the CPU, where a copy is not made by itself."""
    store = checkpoints()
    model, optimizer, outer = make_replica(1)
    before = {name: tensor.clone() for name, tensor in outer["tensors"].items()}
    store.save(1, outer, model, optimizer)
    for tensor in outer["tensors"].values():
        tensor.fill_(-1.0)
    store.wait()
    other_model, other_optimizer, other_outer = make_replica(2)
    loaded = store.load(1, other_outer, other_model, other_optimizer)
    assert all(torch.equal(loaded["tensors"][name], before[name]) for name in before)


def replica_with_special_parameters(name, seed=0, frozen=("frozen.weight",)):
    """Has a layer that is never used and one that is not trained."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({key: torch.nn.Linear(4, 4) for key in ("first", "unused", "frozen")})
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name not in frozen)
    optimizer = build_inner_optimizer(model, Optimizer(name=name))
    for _ in range(3):
        model["frozen"](model["first"](torch.randn(5, 4))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, {"tensors": {}, "record": {}}


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_parameters_that_are_never_used_or_not_trained_come_back_too(checkpoints, name):
    """Case B48."""
    store = checkpoints()
    model, optimizer, outer = replica_with_special_parameters(name)
    store.save(1, outer, model, optimizer)
    store.wait()
    other_model, other_optimizer, other_outer = replica_with_special_parameters(name, seed=1)
    store.load(1, other_outer, other_model, other_optimizer)
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        saved, loaded = optimizer.state.get(mine, {}), other_optimizer.state.get(theirs, {})
        assert saved.keys() == loaded.keys()
        assert bool(saved) == mine.requires_grad
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_trained_parameter_whose_state_is_not_there_is_named(checkpoints, name):
    """Case B48: it was frozen when the checkpoint was written."""
    store = checkpoints()
    model, optimizer, outer = replica_with_special_parameters(name)
    store.save(1, outer, model, optimizer)
    store.wait()
    model, optimizer, outer = replica_with_special_parameters(name, frozen=())
    before = {key: value.clone() for key, value in optimizer.state[model["first"].weight].items()}
    with pytest.raises(CheckpointError, match=r"it has no optimizer state frozen\.weight\.") as error:
        store.load(1, outer, model, optimizer)
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[model["first"].weight].items())


def test_a_checkpoint_of_another_optimizer_is_refused(checkpoints):
    store = checkpoints()
    model, optimizer, outer = replica_with_special_parameters("AdamW")
    store.save(1, outer, model, optimizer)
    store.wait()
    model, optimizer, outer = replica_with_special_parameters("Muon")
    with pytest.raises(CheckpointError, match=r"no optimizer state first\.weight\.momentum_buffer .*another optimizer"):
        store.load(1, outer, model, optimizer)


def test_an_optimizer_without_state_for_what_it_trains_is_not_saved(checkpoints):
    """Case B48: torch leaves such a parameter out in silence."""
    model, optimizer, outer = replica_with_special_parameters("AdamW")
    del optimizer.state[model["first"].bias]
    with pytest.raises(CheckpointError, match=r"no state for first\.bias"):
        checkpoints().save(1, outer, model, optimizer)


def truncate(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def remove_a_file(folder):
    (folder / ".metadata").unlink()


def remove_the_marker(folder):
    (folder / "checkpoint.json").unlink()


def scribble_over_the_marker(folder):
    (folder / "checkpoint.json").write_text("{")


BREAKAGES = {
    truncate: "cut short",
    remove_a_file: ".metadata is missing",
    remove_the_marker: "was not written to the end",
    scribble_over_the_marker: "cannot be read",
}


@pytest.mark.parametrize(("breakage", "reason"), BREAKAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_newest_checkpoint_is_skipped_with_its_reason(checkpoints, caplog, breakage, reason):
    """Case B44."""
    store = checkpoints()
    save(store, 1)
    save(store, 2)
    breakage(folder_of(store, 2))
    assert store.restorable_rounds() == [1]
    assert reason in caplog.text
    assert "round-2" in caplog.text


def test_one_that_was_never_finished_is_no_checkpoint_that_broke(checkpoints, caplog):
    """A group that was killed while it wrote its first one is healed by the others; alone, admission sees the loss."""
    store = checkpoints()
    save(store, 1)
    remove_the_marker(folder_of(store, 1))
    assert store.restorable_rounds() == []
    assert "was not written to the end" in caplog.text


def test_a_checkpoint_is_whole_as_soon_as_it_is_written_whoever_waits(checkpoints):
    store = checkpoints()
    model, optimizer, outer = make_replica(1)
    store.save(1, outer, model, optimizer)
    wait_until((folder_of(store, 1) / "checkpoint.json").exists, "the writing thread marks it")
    assert store.restorable_rounds() == [1]


@pytest.mark.parametrize("breakage", [each for each in BREAKAGES if each is not remove_the_marker])
def test_a_sole_broken_checkpoint_stops_the_run(checkpoints, breakage):
    """Case B46: never start from scratch in silence."""
    store = checkpoints()
    save(store, 1)
    breakage(folder_of(store, 1))
    with pytest.raises(CheckpointError, match=BREAKAGES[breakage]) as error:
        store.restorable_rounds()
    assert "--fresh" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_model_is_refused_and_named(checkpoints):
    save(checkpoints(), 1)
    shapes = {name: list(p.shape) for name, p in make_replica(0)[0].named_parameters()} | {"0.weight": [3, 5]}
    with pytest.raises(CheckpointError, match=r"another model \(0\.weight is \[3, 4\] there and \[3, 5\] here\)"):
        checkpoints(shapes=shapes).restorable_rounds()


def test_a_file_that_cannot_be_loaded_is_one_line(checkpoints):
    store = checkpoints()
    save(store, 1)
    file = next(folder_of(store, 1).glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    model, optimizer, outer = make_replica(2)
    with pytest.raises(CheckpointError, match="cannot be loaded") as error:
        store.load(1, outer, model, optimizer)
    assert "\n" not in str(error.value)


def test_the_latest_are_kept_and_the_last_whole_one_always(checkpoints):
    store = checkpoints(keep_latest_k=2)
    for round_number in (1, 2, 3, 10):
        save(store, round_number)
    assert store.restorable_rounds() == [3, 10]
    assert sorted(folder.name for folder in store._folder.iterdir()) == ["round-10", "round-3"]


def test_a_round_given_up_is_not_restored_but_its_files_stay(checkpoints):
    store = checkpoints()
    for round_number in (1, 2, 3):
        save(store, round_number)
    store.go_back_to(1)
    assert store.restorable_rounds() == [1]
    assert list(folder_of(store, 3).glob("*.distcp"))
    save(store, 2)
    assert store.restorable_rounds() == [1, 2]


def test_fresh_sets_everything_aside(checkpoints):
    store = checkpoints()
    save(store, 1)
    store.set_all_aside()
    assert store.restorable_rounds() == []


class Unwritable:
    """Makes the writing thread fail halfway, as a full disk does."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("ask", ["wait", "save", "raise_if_failed"])
def test_a_checkpoint_that_cannot_be_written_is_reported(checkpoints, ask):
    store = checkpoints()
    model, optimizer, outer = make_replica(1)
    outer["tensors"]["unwritable"] = Unwritable()
    store.save(1, outer, model, optimizer)
    store._finished.wait()
    arguments = (2, outer, model, optimizer) if ask == "save" else ()
    with pytest.raises(CheckpointError, match=r"could not be written .*No space left") as error:
        getattr(store, ask)(*arguments)
    assert "\n" not in str(error.value)
    assert store.restorable_rounds() == []
    store.wait()  # said once


def test_the_marker_says_what_the_checkpoint_is(checkpoints):
    store = checkpoints()
    save(store, 4)
    marker = json.loads((folder_of(store, 4) / "checkpoint.json").read_text())
    assert marker["round"] == 4
    assert set(marker["files"]) == {file.name for file in folder_of(store, 4).iterdir()} - {"checkpoint.json"}


def test_outer_state_of_another_method_is_named(checkpoints):
    """Without outer momentum there is none in the checkpoint."""
    store = checkpoints()
    model, optimizer, outer = replica_with_special_parameters("AdamW")
    store.save(1, outer, model, optimizer)
    store.wait()
    outer["tensors"]["momentum_buffer.first.weight"] = torch.zeros(3)
    with pytest.raises(
        CheckpointError, match=r"no outer state momentum_buffer\.first\.weight: .* another outer\.method"
    ):
        store.load(1, outer, model, optimizer)
