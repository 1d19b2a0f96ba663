"""IsoLoCo: outer rounds for replicas that train apart, with isotropic pseudo-gradients. Imports torch only.

``TorchFTFleet`` is loaded, and torchft with it, when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from isoloco.aggregate import Aggregation, aggregate
from isoloco.digest import digest
from isoloco.fleet import Fleet, FleetError, SoloFleet, VirtualFleet
from isoloco.isotropic import isotropic
from isoloco.ledger import Ledger
from isoloco.muon import Muon
from isoloco.newton_schulz import newton_schulz
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound, OuterRule, RoundReport

if TYPE_CHECKING:
    from isoloco.torchft_fleet import TorchFTFleet

__all__ = [
    "Aggregation",
    "Fleet",
    "FleetError",
    "Ledger",
    "Muon",
    "OuterOptimizer",
    "OuterRound",
    "OuterRule",
    "RoundReport",
    "SoloFleet",
    "TorchFTFleet",
    "VirtualFleet",
    "aggregate",
    "digest",
    "isotropic",
    "newton_schulz",
]


def __getattr__(name: str) -> Any:
    if name == "TorchFTFleet":
        from isoloco.torchft_fleet import TorchFTFleet

        return TorchFTFleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
