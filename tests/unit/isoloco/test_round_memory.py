"""B75: what a round takes beside its state does not grow with the number of replicas, and is about a bucket."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isoloco.aggregate import MEAN
from isoloco.fleet import VirtualFleet
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.pseudo_gradients import Members, PseudoGradients

SHAPES = {"embedding": (4096, 256), **{f"layer{i}": (512, 256) for i in range(8)}, "gain": (4096,)}
BUCKET = 4 * 2**20
LARGEST = 4 * 4096 * 256
NUM_PARAMETERS = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that was allocated at a time while ``function`` ran, beyond what was before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        function()
    events: Any = profile.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


def round_of(num_replicas: int, **options: Any) -> tuple[PseudoGradients, Callable[[], Any], OuterOptimizer]:
    theta = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    replicas = [{name: tensor + 0.1 for name, tensor in theta.items()} for _ in range(num_replicas)]
    optimizer = OuterOptimizer(theta.items(), lr=0.7, bucket_bytes=BUCKET, **options)
    pseudo_gradients = PseudoGradients(
        VirtualFleet(range(num_replicas)), theta, replicas, optimizer, MEAN, group=None, bucket_bytes=BUCKET
    )

    def combine() -> None:
        ids = range(num_replicas)
        seconds = {"exchange": 0.0, "orthogonalize": 0.0, "wait": 0.0}
        pseudo_gradients.combine(Members(ids, [1.0] * num_replicas, ids), round_number=1, seconds=seconds)
        pseudo_gradients.norms()

    return pseudo_gradients, combine, optimizer


@pytest.mark.parametrize("isotropic", ["newton_schulz", "svd"])
def test_memory_of_a_round_is_a_bucket_beside_the_staged_average_whatever_the_number_of_replicas(
    isotropic: str,
) -> None:
    staged = 4 * NUM_PARAMETERS  # Δ̄ of every tensor
    peaks = {}
    for num_replicas in (2, 8):
        _, combine, _ = round_of(num_replicas, isotropic=isotropic, scale="rms" if isotropic != "svd" else "mean")
        peaks[num_replicas] = peak_bytes(combine) - staged
    assert peaks[8] <= 1.05 * peaks[2]
    assert peaks[8] <= 1.25 * max(BUCKET, 2 * LARGEST)


def test_applying_takes_no_memory_to_speak_of() -> None:
    _, combine, optimizer = round_of(2, isotropic="newton_schulz", scale="rms")
    combine()
    assert peak_bytes(optimizer.apply) <= LARGEST / 2


def test_all_matrices_are_corrected_and_their_momentum_is_in_the_optimizer_s_state() -> None:
    """By real names, and no more than asked for."""
    _, _, optimizer = round_of(1, isotropic="svd", exclude=["embedding"])
    assert set(optimizer.split_sizes) == {f"layer{index}" for index in range(8)}
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == list(SHAPES)
    assert [tuple(entry["momentum_buffer"].shape) for entry in state["state"].values()] == list(SHAPES.values())
