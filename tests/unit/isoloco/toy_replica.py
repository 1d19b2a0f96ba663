"""A replica small enough to train a thousand times in a test, with everything that a real one has."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isoloco.fleet import Fleet
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound, RoundReport

SAMPLES_PER_STEP = 3
SAMPLES_PER_EPOCH = 50

MakeInner = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)


def sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, foreach=False)


class ToyReplica:
    """A matrix and two vectors that learn to map random inputs to random outputs; sample g has its own random pair."""

    def __init__(self, make_inner: MakeInner = adamw, *, seed: int = 0, matrix: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"matrix": (4, 5), "gain": (5,), "bias": (4,)} if matrix else {"gain": (4,), "bias": (4,)}
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()
        }
        self.inner = make_inner(list(self.parameters.values()))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda step: 1 / (1 + 0.1 * step))
        self.seen: list[int] = []  # samples in the order in which they were learnt

    def learn(self, samples: Sequence[int]) -> Tensor:
        """One inner step; returns the sum of the samples' losses."""
        losses = []
        for sample in samples:
            generator = torch.Generator().manual_seed(sample % SAMPLES_PER_EPOCH)
            inputs, wanted = torch.randn(5, generator=generator), torch.randn(4, generator=generator)
            output = self.parameters["bias"]
            if "matrix" in self.parameters:
                output = output + self.parameters["matrix"] @ (inputs * self.parameters["gain"])
            else:
                output = output + inputs[:4] * self.parameters["gain"]
            losses.append((output - wanted).square().sum())
        loss = torch.stack(losses).sum()
        self.inner.zero_grad()
        (loss / len(samples)).backward()
        self.inner.step()
        self.schedule.step()
        self.seen += samples
        return loss.detach()

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def own_state(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "schedule": self.schedule.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.schedule.load_state_dict(state["schedule"])


def make_round(
    fleet: Fleet,
    replicas: Sequence[ToyReplica],
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
    isotropic: str | None = None,
    exclude: Sequence[str] = (),
    target: str = "gradient",
    **settings: Any,
) -> OuterRound:
    """An OuterRound over toys: DiLoCo with H = 2 for three rounds, if nothing else is said."""
    return OuterRound(
        fleet,
        [replica.parameters.items() for replica in replicas],
        partial(OuterOptimizer, lr=lr, momentum=momentum, isotropic=isotropic, exclude=exclude, target=target),
        Ledger(SAMPLES_PER_EPOCH),
        **{
            "sync_steps": 2,
            "total_steps": 6,
            "samples_per_step": SAMPLES_PER_STEP,
            "config": {"outer.lr": lr},
            **settings,
        },
    )


def phase(outer: OuterRound, replicas: Sequence[ToyReplica], tokens: Sequence[int] | None = None) -> RoundReport:
    """Train every local replica on its grant until the next meeting; return that meeting's report."""
    grants = [
        [sample for start, stop in outer.ledger.grants[replica_id] for sample in range(start, stop)]
        for replica_id in outer.fleet.local_replica_ids
    ]
    report = None
    for step in range(outer.steps_in_phase):
        batch = slice(step * SAMPLES_PER_STEP, (step + 1) * SAMPLES_PER_STEP)
        losses = [replica.learn(grant[batch]) for replica, grant in zip(replicas, grants, strict=True)]
        report = outer.after_step(tokens or [10] * len(replicas), losses)
    assert report is not None, "a phase ends with a meeting"
    return report


def train(outer: OuterRound, replicas: Sequence[ToyReplica], num_rounds: int | None = None) -> list[RoundReport]:
    """Start, and train to the end or for a number of phases; all reports, the one of the start included."""
    reports = [outer.start()]
    while not outer.finished and (num_rounds is None or len(reports) <= num_rounds):
        reports.append(phase(outer, replicas))
    return reports
