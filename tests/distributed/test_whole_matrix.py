"""Sharded matrices are worked on whole, each on one rank, and nothing travels that need not (I19, I20, B68, B75).

Two ranks and four, as FSDP2 and tensor parallelism place parameters, alone and together, shards uneven and empty. Each
world runs once for all its cases; what it measured is then judged case by case.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoloco.owners import orthogonalization_cost
from isoloco.whole_matrix import Job, WholeMatrices, apply_to_whole
from isoloco.work_plan import Kind, make_plans
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

# (mesh shape, placement on each mesh axis)
Layout = tuple[tuple[int, ...], tuple[Placement, ...]]
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "rows": ((2,), (Shard(0),)),
        "columns": ((2,), (Shard(1),)),
        "third_dim": ((2,), (Shard(2),)),
        "replicated": ((2,), (Replicate(),)),
        "alone": ((2, 1), (Replicate(), Shard(0))),
    },
    4: {
        "rows": ((4,), (Shard(0),)),
        "columns": ((4,), (Shard(1),)),
        "replicated": ((4,), (Replicate(),)),
        "rows_and_columns": ((2, 2), (Shard(0), Shard(1))),
        "columns_and_rows": ((2, 2), (Shard(1), Shard(0))),
        "strided_rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "strided_columns": ((2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
        "rows_of_rows": ((2, 2), (Shard(0), Shard(0))),
        "rows_replicated": ((2, 2), (Shard(0), Replicate())),
        "replicated_rows": ((2, 2), (Replicate(), Shard(0))),
    },
}
SHAPES = {
    "tall": (24, 10),
    "wide": (10, 24),
    "square": (16, 16),
    "odd_rows": (65, 7),
    "few_rows": (3, 8),  # fewer than four ranks: empty shards
    "single_row": (1, 12),
    "vector": (13,),
    "stack": (3, 5, 4),
    "no_elements": (0, 5),
}
# of the inputs and of the output
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp64": (torch.float64, torch.float64),
    "fp32_to_bf16": (torch.float32, torch.bfloat16),
    "bf16_to_fp32": (torch.bfloat16, torch.float32),
}
# Linear layers of the 178M model, a sixteenth as large in each dim: embedding, head, and 9 layers.
MODEL = [(2000, 64)] * 2 + ([(64, 64)] * 4 + [(168, 64)] * 2 + [(64, 168)]) * 9


def is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


class Watch(TorchDispatchMode):
    """While entered: the collectives of this rank, the bytes they bring, and the most memory that new tensors took."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.received = 0
        self.new: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::").rstrip("_")
            self.collectives[name] += 1
            if name == "alltoall_base":
                self.received += args[0].numel()
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if is_plain(leaf)}
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if is_plain(leaf)):
            if storage._cdata not in before and storage not in self.new:
                self.new.add(storage)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.new))
        return out


def numbered(shape: tuple[int, ...], first: int) -> torch.Tensor:
    """Whole numbers below 128, which all dtypes hold exactly."""
    return ((torch.arange(torch.Size(shape).numel()) + first) % 128).view(shape).float()


def reversed_sum(numbers: list[int], stacks: list[torch.Tensor]) -> torch.Tensor:
    """Another function of a shard than of the matrix; spoils its scratch."""
    result = torch.stack(stacks).sum(dim=0).flatten(1).flip(1).view_as(stacks[0])
    for stack in stacks:
        stack.fill_(-1)
    return result


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    # a vector has no columns to cut: tensor parallelism replicates it
    placements = tuple(
        Replicate() if isinstance(placement, Shard | _StridedShard) and placement.dim >= tensor.dim() else placement
        for placement in placements
    )
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def jobs_of_layout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, tuple[Job, torch.Tensor]]:
    """By name, jobs of all shapes and dtypes, and what this rank should hold of their results."""
    jobs = {}
    for first, (shape_name, shape) in enumerate(SHAPES.items()):
        for dtype_name, (dtype, output_dtype) in DTYPES.items():
            tensor = numbered(shape, first).to(dtype)
            expected = reversed_sum([0], [tensor.clone()[None]])[0].to(output_dtype)
            source = place(tensor, mesh, placements)
            job = Job((source,), torch.empty_like(source, dtype=output_dtype))
            jobs[f"{shape_name} {dtype_name}"] = job, place(expected, mesh, placements).to_local()
    source = place(numbered((9, 4), 0), mesh, placements)
    expected = place(numbered((9, 4), 0).flatten().flip(0).view(9, 4), mesh, placements)
    jobs["in place"] = Job((source,), source), expected.to_local()
    inputs = [numbered((9, 4), first) for first in range(3)]
    expected = place(reversed_sum([0], [tensor.clone()[None] for tensor in inputs])[0], mesh, placements)
    jobs["of three"] = (
        Job(tuple(place(tensor, mesh, placements) for tensor in inputs), torch.empty_like(source)),
        expected.to_local(),
    )
    return jobs


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(jobs: dict[str, tuple[Job, torch.Tensor]], engine: WholeMatrices) -> dict[str, Any]:
    """Apply once. Which results are wrong here, which jobs were worked on here, and what the plan cost and the work."""
    worked_on: list[str] = []
    names = list(jobs)

    def function(numbers: list[int], stacks: list[torch.Tensor]) -> torch.Tensor:
        worked_on.extend(names[number] for number in numbers)
        return reversed_sum(numbers, stacks)

    engine.apply([job for job, _ in jobs.values()], function)
    wrong = [name for name, (job, expected) in jobs.items() if not torch.equal(local(job.output), expected)]
    return {"wrong": wrong, "worked_on": worked_on, "names": names}


def every_layout(world_size: int) -> dict[str, dict]:
    """One call for each layout, then one for all of them and plain tensors, on meshes of one dim and of two."""
    engine = WholeMatrices()
    found = {}
    everything = {}
    for layout, (mesh_shape, placements) in LAYOUTS[world_size].items():
        mesh = init_device_mesh("cpu", mesh_shape)
        found[layout] = check(jobs_of_layout(mesh, placements), engine)
        everything |= {f"{layout} {name}": job for name, job in jobs_of_layout(mesh, placements).items()}
    found["everything"] = check(everything, engine)
    # another subset for the same engine, and a plain tensor between sharded ones
    plain = numbered((6, 4), 5)
    expected = reversed_sum([0], [plain.clone()[None]])[0]
    for name in ("mixed", "mixed, one less"):
        mixed = {"plain": (Job((plain,), torch.empty_like(plain)), expected)} if name == "mixed" else {}
        mixed |= dict(list(jobs_of_layout(mesh, placements).items())[::3])
        found[name] = check(mixed, engine)
    return found


def work_and_traffic(world_size: int) -> dict[str, Any]:
    """Of the model's matrices, sharded by rows: who does how much, what is sent, and how much memory it takes."""
    mesh = init_device_mesh("cpu", (world_size,))
    sources = [place(torch.ones(shape), mesh, (Shard(0),)) for shape in MODEL]
    jobs = [Job((source,), torch.empty_like(source)) for source in sources]
    largest = 2000 * 64 * 4
    # in proportion to 256 MB and the model's own embedding
    engine = WholeMatrices(bucket_bytes=2**20, agree=True)
    worked_on: list[int] = []

    def function(numbers: list[int], stacks: list[torch.Tensor]) -> torch.Tensor:
        worked_on.extend(numbers)
        return stacks[0].neg()

    engine.apply(jobs, function)
    for job in jobs:
        local(job.output).zero_()
    with Watch() as watch:
        engine.apply(jobs, function)
    total = sum(orthogonalization_cost(shape) for shape in MODEL)
    own_bytes = sum(local(source).numel() * 4 for source in sources)
    owned_bytes = sum(sources[number].numel() * 4 for number in worked_on[: len(worked_on) // 2])
    owned_here_bytes = sum(local(sources[number]).numel() * 4 for number in worked_on[: len(worked_on) // 2])
    return {
        "right": all(bool((local(job.output) == -1).all()) for job in jobs),
        "same_again": worked_on[: len(worked_on) // 2] == worked_on[len(worked_on) // 2 :],
        "worked_on": worked_on[: len(worked_on) // 2],
        "num_matrices": engine.num_matrices,
        "share": engine.work / 2 / total,
        "collectives": dict(watch.collectives),
        "received": watch.received,
        # what others have of its matrices, and what others made of its parts
        "needed": (owned_bytes - owned_here_bytes) + (own_bytes - owned_here_bytes),
        "peak": watch.peak,
        "largest": largest,
    }


def memory_of_copies(world_size: int) -> dict[str, int]:
    """Peak of one replicated matrix that all others get back: copies are sent one after the other."""
    mesh = init_device_mesh("cpu", (world_size,))
    source = place(torch.ones(256, 64), mesh, (Replicate(),))
    job = Job((source,), torch.empty_like(source))
    found = {}
    for name, bucket_bytes in (("large", 2**20), ("small", 2**10)):
        engine = WholeMatrices(bucket_bytes=bucket_bytes, agree=False)
        engine.apply([job], lambda _, stacks: stacks[0].neg())
        with Watch() as watch:
            engine.apply([job], lambda _, stacks: stacks[0].neg_())
        assert bool((job.output.to_local() == -1).all())
        found[name] = watch.peak // (256 * 64 * 4)
        found[f"{name}_transfers"] = watch.collectives["alltoall_base"]
    return found


def memory_of_178m(world_size: int) -> int:
    """By its plan, the most bytes that a rank holds at once for the real model, with one result beside its matrices."""
    mesh = init_device_mesh("cpu", (world_size,))
    shapes = [(32000, 1024)] * 2 + ([(1024, 1024)] * 4 + [(2688, 1024)] * 3) * 9
    kinds = [
        Kind(
            shape=torch.Size(shape),
            num_inputs=1,
            dtype=torch.float32,
            output_dtype=torch.float32,
            device=torch.device("cpu"),
            mesh=mesh,
            placements=(Shard(0),),
            local_shape=torch.Size((shape[0] // world_size, shape[1])),
            key=None,
        )
        for shape in shapes
    ]
    (plan,) = make_plans(kinds, 256 * 2**20)
    peak = 0
    for wave in plan.waves:
        batch = wave.batches.get(plan.rank)
        whole = batch.kind.num_bytes * len(batch.numbers) if batch is not None else 0
        sent, received = (
            sum(parcel.num_bytes for parcel in parcels.values())
            for parcels in (wave.gather.outgoing, wave.gather.incoming)
        )
        peak = max(peak, sent + received, received + whole, 2 * whole)
        assert len(wave.returns) == 1
        sent, received = (
            sum(parcel.num_bytes for parcel in parcels.values())
            for parcels in (wave.returns[0].outgoing, wave.returns[0].incoming)
        )
        peak = max(peak, whole + sent, sent + received)
    return peak


def batches_by_key() -> list[list[int]]:
    """Jobs 0..7 of one shape, two of which fit in half a bucket; 1 and 5 have another key, 6 is half sharded."""
    mesh = init_device_mesh("cpu", (2,))
    jobs = []
    for number in range(8):
        source = place(torch.ones(4, 4), mesh, (Replicate() if number == 6 else Shard(0),))
        jobs.append(Job((source,), source, key="other" if number in (1, 5) else None))
    batches: list[list[int]] = []

    def function(numbers: list[int], stacks: list[torch.Tensor]) -> torch.Tensor:
        batches.append(numbers)
        return stacks[0]

    WholeMatrices(bucket_bytes=2 * 2 * 64).apply(jobs, function)
    return batches


def refuse(error: Callable[[], Exception], agree: bool, layout: Layout) -> dict[str, Any]:
    """A function that raises for job 3 alone: what each rank sees of it, and whether the engine still works."""
    mesh_shape, placements = layout
    mesh = init_device_mesh("cpu", mesh_shape)
    sources = [place(torch.ones(8, 6), mesh, placements) for _ in range(5)]
    jobs = [Job((source,), torch.empty_like(source), key=number) for number, source in enumerate(sources)]
    engine = WholeMatrices(agree=agree)

    def function(numbers: list[int], stacks: list[torch.Tensor]) -> torch.Tensor:
        if 3 in numbers:
            raise error()
        return stacks[0]

    raised = ""
    try:
        engine.apply(jobs, function)
    except (ValueError, RuntimeError, LookupError) as caught:
        raised = f"{type(caught).__name__}: {caught}"
    nan_from = [number for number, job in enumerate(jobs) if bool(local(job.output).isnan().all())]
    engine.apply(jobs, lambda _, stacks: stacks[0] * 2)
    recovered = all(bool((local(job.output) == 2).all()) for job in jobs)
    return {"raised": raised, "nan": nan_from, "recovered": recovered}


def check_model(model: nn.Module, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    jobs = {}
    for name, parameter in model.named_parameters():
        part = distribute_tensor(expected[name], parameter.device_mesh, parameter.placements, src_data_rank=None)
        jobs[name] = Job((parameter,), torch.empty_like(parameter)), part.to_local()
    return check(jobs, WholeMatrices())


def models_as_torch_shards_them() -> dict[str, list[dict]]:
    """Models with a norm between their layers, even, uneven and with empty shards, all parameters in one call."""
    found: dict[str, list[dict]] = {"fsdp2": [], "fsdp2_and_tensor_parallelism": []}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for inner, middle, outer in ((8, 16, 8), (5, 13, 65), (4, 3, 6)):
        for parallelism, results in found.items():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(inner, middle), nn.Linear(middle, outer, bias=False), nn.LayerNorm(outer), nn.Linear(outer, 3)
            )
            expected = {
                name: parameter.detach().flatten().flip(0).view(parameter.shape)
                for name, parameter in model.named_parameters()
            }
            if parallelism == "fsdp2":
                fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            else:
                plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()}
                parallelize_module(model, mesh["tp"], plan)
                fully_shard(model, mesh=mesh["dp_shard"])
                sizes = {parameter.device_mesh.size() for parameter in model.parameters()}
                assert sizes == {2, 4}, "the last layer knows nothing of tensor parallelism"
            results.append(check_model(model, expected))
    return found


def meshes_of_some_ranks() -> dict[str, dict]:
    """Two dims of three, one dim of one rank, and a mesh of two ranks alone: none has all ranks of the world."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replica", "dp", "tp"))
    found = {"submesh": check(jobs_of_layout(mesh["dp", "tp"], (Shard(0), Shard(1))), WholeMatrices())}
    found["single"] = check(jobs_of_layout(mesh["tp"], (Shard(0),)), WholeMatrices())
    pair = DeviceMesh("cpu", [[1, 3]], mesh_dim_names=("a", "b"))
    found["pair"] = check(jobs_of_layout(pair, (Replicate(), Shard(0))), WholeMatrices())
    return found


def errors_in_what_is_given() -> list[str]:
    """The messages, which must be the same on all ranks: none waits for another."""
    mesh = init_device_mesh("cpu", (2,))
    rows = place(torch.ones(6, 4), mesh, (Shard(0),))
    parts = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    differing = torch.ones(6, 4 + dist.get_rank())
    uneven = DTensor.from_local(
        torch.ones(1 + 4 * dist.get_rank(), 4), mesh, [Shard(0)], run_check=False, shape=rows.shape, stride=(4, 1)
    )
    messages = []
    for jobs, error in (
        ([Job((parts,), parts)], "reduce it first"),
        ([Job((rows,), place(torch.ones(6, 4), mesh, (Shard(1),)))], "job 0: .*placement"),
        ([Job((rows, rows.double()), rows)], "job 0: .*dtype"),
        ([Job((rows,), torch.ones(6, 4))], "job 0: .*placement"),
        ([Job((rows,), rows), Job((), rows)], "job 1 has no inputs"),
        ([Job((place(differing, mesh, (Shard(0),)),), place(differing, mesh, (Shard(0),)))], "different matrices"),
        ([Job((rows,), rows)] * (1 + dist.get_rank()), "different matrices"),
        ([Job((uneven,), uneven)], r"holds \(1, 4\) of a tensor of shape \(6, 4\)"),
    ):
        with pytest.raises(ValueError, match=error) as caught:
            WholeMatrices().apply(jobs, reversed_sum)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="reduce it first"):
        apply_to_whole(parts, lambda whole: whole)
    return [messages[0], *messages[2:3], *messages[4:]]


ROWS_OF_TWO: Layout = ((2,), (Shard(0),))


def measure(world_size: int) -> dict[str, Any]:
    """Everything that is asked of a world of so many ranks, in one start of its processes."""
    measured: dict[str, Any] = {
        "layouts": every_layout(world_size),
        "model_178m": work_and_traffic(world_size),
        "memory_178m": memory_of_178m(world_size),
        "memory_of_copies": memory_of_copies(world_size),
    }
    if world_size == 2:
        measured["batches"] = batches_by_key()
        measured["value_error"] = refuse(lambda: ValueError("weight: non-finite"), True, ROWS_OF_TWO)
        measured["other_error"] = refuse(lambda: KeyError("weight"), True, ROWS_OF_TWO)
        measured["without_agreement"] = refuse(lambda: KeyError("weight"), False, ROWS_OF_TWO)
        measured["misuse"] = errors_in_what_is_given()
    else:
        measured["value_error"] = refuse(
            lambda: ValueError("weight: non-finite"), True, ((2, 2), (Shard(0), Replicate()))
        )
        measured["models"] = models_as_torch_shards_them()
        measured["some_ranks"] = meshes_of_some_ranks()
    return measured


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict]]:
    """By world size, what each rank measured."""
    return {world_size: run_ranks(world_size, measure, world_size) for world_size in LAYOUTS}


def worked_on_once(found: list[dict]) -> bool:
    """Whether each job was worked on by exactly one of the ranks, which hand in what :func:`check` found."""
    return Counter(name for each in found for name in each["worked_on"]) == Counter(found[0]["names"])


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(size, layout) for size, layouts in LAYOUTS.items() for layout in (*layouts, "everything")],
)
def test_each_matrix_is_worked_on_whole_by_one_rank_and_all_get_their_part(worlds, world_size, layout) -> None:
    """I19, I20: bit for bit, every shape and dtype; several inputs; in place; one layout or all in one call."""
    found = [measured["layouts"][layout] for measured in worlds[world_size]]
    for each in found:
        assert each["wrong"] == []
    assert worked_on_once(found)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_plain_tensors_are_worked_on_by_everyone(worlds, world_size: int) -> None:
    """In the same call as sharded ones. Another call may bring other matrices."""
    with_plain = [measured["layouts"]["mixed"] for measured in worlds[world_size]]
    without = [measured["layouts"]["mixed, one less"] for measured in worlds[world_size]]
    for each in with_plain + without:
        assert each["wrong"] == []
    assert all("plain" in each["worked_on"] for each in with_plain)
    assert worked_on_once(without)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_the_matrices_of_a_model_are_divided_evenly(worlds, world_size: int) -> None:
    """Every rank does its share of the orthogonalisation, up to 5 %."""
    found = [measured["model_178m"] for measured in worlds[world_size]]
    assert sorted(number for each in found for number in each["worked_on"]) == list(range(len(MODEL)))
    for each in found:
        assert each["right"]
        assert each["share"] == pytest.approx(1 / world_size, rel=0.05)
        assert each["num_matrices"] == 2 * len(each["worked_on"]), "it counts, over two calls"
        assert each["same_again"], "shapes alone decide who works on what"


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_no_matrix_is_gathered_where_it_is_not_worked_on(worlds, world_size: int) -> None:
    """A rank receives what it lacks of its own matrices and its parts of the others, and not a byte more."""
    for measured in worlds[world_size]:
        found = measured["model_178m"]
        assert found["collectives"].keys() == {"alltoall_base", "allreduce"}
        assert found["collectives"]["allreduce"] == 1, "the agreement that nobody failed"
        assert found["received"] == found["needed"]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_a_rank_holds_two_batches_at_most(worlds, world_size: int) -> None:
    """B75: a batch and its results, here as large as one embedding, whatever the model's size. Counted in the run."""
    found = [measured["model_178m"] for measured in worlds[world_size]]
    largest = found[0]["largest"]
    peak = max(each["peak"] for each in found)
    assert 2 * largest <= peak <= 3 * largest, "gloo lets go of what it has sent a moment after it has sent it"


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_the_178m_model_needs_less_than_300_megabytes(worlds, world_size: int) -> None:
    """B75: with buckets of 256 MiB, fp32, beside parameters and gradients."""
    for measured in worlds[world_size]:
        assert measured["memory_178m"] < 300e6


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_copies_of_a_replicated_matrix_are_sent_at_once_only_if_they_fit_in_a_bucket(worlds, world_size: int) -> None:
    found = [measured["memory_of_copies"] for measured in worlds[world_size]]
    assert max(each["large"] for each in found) == world_size, "the result, and one copy for each of the others"
    assert max(each["small"] for each in found) == 2
    assert all(each["large_transfers"] == 1 for each in found), "nothing is gathered"
    assert all(each["small_transfers"] == world_size - 1 for each in found)


def test_batches_are_of_equal_jobs_and_no_larger_than_half_a_bucket(worlds) -> None:
    """Of eight equal jobs each rank owns four, the even and the odd ones."""
    found = [sorted(measured["batches"]) for measured in worlds[2]]
    assert found == [[[0, 2], [4], [6]], [[1, 5], [3, 7]]]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_an_error_on_the_owner_is_raised_by_all_ranks(worlds, world_size: int) -> None:
    for measured in worlds[world_size]:
        found = measured["value_error"]
        assert found["raised"] == "ValueError: weight: non-finite"
        assert found["recovered"], "nobody is left waiting: the next call works"


def test_errors_that_are_no_value_errors_name_what_they_were(worlds) -> None:
    for measured in worlds[2]:
        assert measured["other_error"]["raised"] == "RuntimeError: KeyError: 'weight'"
        assert measured["other_error"]["recovered"]


def test_without_agreement_the_others_find_nan(worlds) -> None:
    found = [measured["without_agreement"] for measured in worlds[2]]
    assert sorted(each["raised"] for each in found) == ["", "KeyError: 'weight'"]
    for each in found:
        assert 3 in each["nan"]
        assert each["nan"] == found[0]["nan"]
        assert each["recovered"]


def test_misuse_is_the_same_error_on_every_rank(worlds) -> None:
    first, second = (measured["misuse"] for measured in worlds[2])
    assert first == second


def test_models_as_torch_shards_them(worlds) -> None:
    """Strided rows, rows × columns, norms that tensor parallelism replicates, and a layer on the FSDP mesh alone."""
    for of_ranks in zip(*(measured["models"]["fsdp2"] for measured in worlds[4]), strict=True):  # by size
        assert all(each["wrong"] == [] for each in of_ranks)
        assert worked_on_once(of_ranks)
    for of_ranks in zip(*(measured["models"]["fsdp2_and_tensor_parallelism"] for measured in worlds[4]), strict=True):
        assert all(each["wrong"] == [] for each in of_ranks)
        counts = Counter(name for each in of_ranks for name in each["worked_on"])
        assert counts == {name: 2 if name.startswith("3.") else 1 for name in of_ranks[0]["names"]}


def test_meshes_of_some_of_the_ranks(worlds) -> None:
    found = [measured["some_ranks"] for measured in worlds[4]]
    for each in found:
        assert all(of_mesh["wrong"] == [] for of_mesh in each.values())
        assert each["single"]["worked_on"] != []
    submeshes = [each["submesh"] for each in found]
    assert worked_on_once(submeshes[:2])
    assert worked_on_once(submeshes[2:])
    pairs = [each["pair"] for each in found]
    assert worked_on_once([pairs[1], pairs[3]])
    assert pairs[0]["worked_on"] == pairs[2]["worked_on"] == []
