"""Whole outer steps of a model: in this process, or by several ranks with shards of it."""

import dataclasses
import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from isoloco import Aggregation, OuterOptimizer, VirtualFleet
from isoloco.pseudo_gradients import Members, PseudoGradients
from tools.benchmark.gaussian_models import Shape, gaussian, parameter_shapes, reference
from tools.benchmark.measured_runs import Run, interleaved, progress, run_once

REPLICA_COUNTS = (2, 8)


class OuterStep:
    """The parameters of a model, or one rank's shards of them, and outer steps with Gaussian pseudo-gradients."""

    def __init__(self, model: str, device: torch.device, *, bucket_bytes: int, mesh: DeviceMesh | None = None) -> None:
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.mesh = mesh
        self.parameters = {name: self._placed(torch.zeros(shape)) for name, shape in parameter_shapes(model).items()}

    def _placed(self, whole: Tensor) -> Tensor:
        if self.mesh is None:
            return whole.to(self.device)
        shards = distribute_tensor(whole.to(self.device), self.mesh, [Shard(0)], src_data_rank=None)
        return shards.clone()  # a shard is a view, which would keep the whole in memory

    def load_gradients(self) -> dict[Shape, Tensor]:
        """The gradient of every matrix is a Gaussian with rows rotated; returns the first of each shape."""
        seen: Counter[Shape] = Counter()
        first: dict[Shape, Tensor] = {}
        for parameter in self.parameters.values():
            shape = tuple(parameter.shape)
            if len(shape) == 2:
                parameter.grad = self._placed(gaussian(shape).roll(seen[shape], 0))
                seen[shape] += 1
                first.setdefault(shape, parameter.grad)
            else:
                parameter.grad = self._placed(torch.ones(shape))
        return first

    def optimizer(self, isotropic: str = "newton_schulz") -> OuterOptimizer:
        return OuterOptimizer(
            self.parameters.items(),
            lr=0.7,
            isotropic=isotropic,
            scale="rms" if isotropic == "newton_schulz" else "mean",
            bucket_bytes=self.bucket_bytes,
            device=self.device if self.mesh is None else None,
        )

    def ours(self, isotropic: str, with_memory: bool) -> tuple[Run, dict[Shape, Tensor]]:
        """One step, and with memory what became of the first matrix of each shape."""
        optimizer = self.optimizer(isotropic)
        first = self.load_gradients()
        if self.mesh is not None:
            dist.barrier()
        _, run = run_once(optimizer.step, self.device, with_memory=with_memory)
        engine = optimizer.whole_matrices
        run = dataclasses.replace(run, num_matrices=(engine.num_matrices,), work=(engine.work,))
        wholes = {
            shape: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
            for shape, tensor in (first.items() if with_memory else ())
        }
        return run, wholes

    def papers_code(self, with_memory: bool) -> tuple[Run, dict[Shape, Tensor]]:
        """What the paper's public code does on every rank: an SVD of each matrix, and torch's SGD."""
        sgd = torch.optim.SGD(self.parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
        for parameter in self.parameters.values():
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        first = self.load_gradients()

        def step() -> None:
            for parameter in self.parameters.values():
                if parameter.dim() == 2:
                    assert parameter.grad is not None
                    U, S, Vt = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.grad.copy_(S.mean() * U @ Vt)
            sgd.step()

        _, run = run_once(step, self.device, with_memory=with_memory)
        return run, {shape: tensor.cpu() for shape, tensor in first.items()}


def step_error(wholes: Mapping[Shape, Tensor], scale: str) -> float:
    """Of the corrected matrices to s · U Vᵀ, both from float64."""
    squares = size = 0.0
    for shape, whole in wholes.items():
        orthogonal, sigma = reference(shape)
        s = sigma.mean() if scale == "mean" else sigma.square().mean().sqrt()
        squares += float((whole / s - orthogonal).double().square().sum())
        size += float(orthogonal.double().square().sum())
    return math.sqrt(squares / size)


class Ranks:
    """Processes, each with its shards of the model, that take steps together when told to."""

    def __init__(self, num_ranks: int, model: str, device_type: str, *, threads: int, bucket_bytes: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Any] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            meeting = f"file://{self._folder.name}/meeting"
            arguments = (rank, num_ranks, meeting, model, device_type, threads, bucket_bytes, theirs)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is noticed
            self._connections.append(ours)
            self._processes.append(process)
        for connection in self._connections:
            connection.recv()

    def step(self, with_memory: bool) -> tuple[Run, dict[Shape, Tensor]]:
        for connection in self._connections:
            connection.send(with_memory)
        runs, wholes = zip(*(connection.recv() for connection in self._connections), strict=True)
        run = Run(
            max(run.seconds for run in runs),
            max(run.extra_bytes for run in runs) if with_memory else None,
            num_matrices=sum((run.num_matrices for run in runs), ()),
            work=sum((run.work for run in runs), ()),
        )
        return run, wholes[0]

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _rank_main(
    rank: int,
    num_ranks: int,
    meeting: str,
    model: str,
    device_type: str,
    threads: int,
    bucket_bytes: int,
    connection: Connection,
) -> None:
    torch.set_num_threads(threads)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh(device_type, (num_ranks,))
    step = OuterStep(model, device, bucket_bytes=bucket_bytes, mesh=mesh)
    step.ours("newton_schulz", False)  # plans are made, connections opened
    connection.send("ready")
    while (with_memory := connection.recv()) is not None:
        run, wholes = step.ours("newton_schulz", with_memory)
        connection.send((run, wholes if rank == 0 else {}))
    dist.destroy_process_group()


PAPERS_CODE = "SVD on every rank, as the paper's public code"
SVD_STEP = "SVD on every rank, isoloco"
NEWTON_SCHULZ_STEP = "Newton–Schulz on every rank"


def measure_steps(
    model: str, device: torch.device, rank_counts: Sequence[int], *, repeats: int, threads: int, bucket_bytes: int
) -> dict[str, list[Run]]:
    """Whole outer steps of the model. Ranks on CPUs share the threads; on GPUs each has one, if there are enough."""
    step = OuterStep(model, device, bucket_bytes=bucket_bytes)
    methods: dict[str, Callable[[bool], tuple[Run, dict[Shape, Tensor]]]] = {
        PAPERS_CODE: step.papers_code,
        SVD_STEP: functools.partial(step.ours, "svd"),
        NEWTON_SCHULZ_STEP: functools.partial(step.ours, "newton_schulz"),
    }
    teams = []
    for num_ranks in rank_counts:
        if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
            progress(f"owner-computes over {num_ranks} ranks is left out: only {torch.cuda.device_count()} GPUs")
            continue
        progress(f"starting {num_ranks} ranks")
        team = Ranks(num_ranks, model, device.type, threads=max(1, threads // num_ranks), bucket_bytes=bucket_bytes)
        teams.append(team)
        methods[owner_computes(num_ranks)] = team.step

    def measured(name: str, method: Callable[[bool], tuple[Run, dict[Shape, Tensor]]], with_memory: bool) -> Run:
        run, wholes = method(with_memory)
        run.error = step_error(wholes, "mean" if name in (PAPERS_CODE, SVD_STEP) else "rms") if with_memory else None
        return run

    named = {name: functools.partial(measured, name, method) for name, method in methods.items()}
    runs = interleaved(f"outer step of {model}", named, repeats, math.inf)
    for team in teams:
        team.close()
    return runs


def owner_computes(num_ranks: int) -> str:
    return f"Newton–Schulz, each matrix on its owner, {num_ranks} ranks"


def measure_exchange(model: str, bucket_bytes: int) -> dict[int, Run]:
    """Number of replicas -> what it takes to combine their pseudo-gradients in one process."""
    step = OuterStep(model, torch.device("cpu"), bucket_bytes=bucket_bytes)
    step.load_gradients()
    trained = {name: -theta.grad for name, theta in step.parameters.items() if theta.grad is not None}
    runs = {}
    for num_replicas in REPLICA_COUNTS:
        progress(f"combining pseudo-gradients of {num_replicas} replicas of {model}")
        fleet = VirtualFleet(range(num_replicas))
        # Replicas are only read, so that one may stand for all: the memory of the others would prove nothing.
        pseudo_gradients = PseudoGradients(
            fleet,
            step.parameters,
            [trained] * num_replicas,
            step.optimizer(),
            Aggregation(),
            group=None,
            bucket_bytes=bucket_bytes,
        )
        combine = functools.partial(
            pseudo_gradients.combine,
            Members(range(num_replicas), [1.0] * num_replicas, range(num_replicas)),
            round_number=1,
            seconds={"exchange": 0.0, "orthogonalize": 0.0, "wait": 0.0},
        )
        for theta in step.parameters.values():
            theta.grad = None
        _, run = run_once(combine, torch.device("cpu"), with_memory=True)
        assert run.extra_bytes is not None
        mean = sum(theta.grad.nbytes for theta in step.parameters.values() if theta.grad is not None)
        runs[num_replicas] = dataclasses.replace(run, extra_bytes=run.extra_bytes - mean)  # it was made first of all
    return runs
