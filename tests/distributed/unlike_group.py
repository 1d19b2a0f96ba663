"""A replica group of one rank as a program, for processes that differ in what hardware they may use.

    python -m tests.distributed.unlike_group REPLICA_ID LIGHTHOUSE NUM_ROUNDS NUM_THREADS OPTIONS

Writes a JSON object: the digest after every round, and the fingerprint of one orthogonalised matrix as this process
would compute it by itself.
"""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from isoloco.digest import digest
from isoloco.isotropic import isotropic
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound
from isoloco.torchft_fleet import TorchFTFleet

SHAPES = {"embedding": (300, 64), "up": (160, 96), "down": (96, 160), "gain": (96,), "square": (128, 128)}


def main(replica_id: int, lighthouse: str, num_rounds: int, num_threads: int, options: dict[str, str]) -> None:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    alone = isotropic(parameters["square"], orthogonalizer=options["isotropic"], scale=options.get("scale", "mean"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fleet = TorchFTFleet(
        replica_id=replica_id,
        lighthouse=lighthouse,
        group=None,
        rank=0,
        world_size=1,
        store_host="127.0.0.1",
        store_port=store.port,
        timeout_seconds=60.0,
        quorum_timeout_seconds=120.0,
    )
    outer = OuterRound(
        fleet,
        [parameters.items()],
        partial(OuterOptimizer, lr=0.7, momentum=0.9, **options),
        Ledger(1000),
        sync_steps=1,
        total_steps=num_rounds,
        samples_per_step=1,
        config={},
        num_replica_groups=2,
    )
    outer.start()
    digests = []
    while not outer.finished:
        for parameter in parameters.values():
            # what a replica learns depends on its hardware, too, and may
            parameter.sub_(0.1 * torch.randn(parameter.shape, generator=generator) + 0.01 * parameter.exp())
        report = outer.after_step([1], [0.0])
        assert report is not None
        assert report.participants == [0, 1]
        digests.append(report.digest)
    print(json.dumps({"digests": digests, "alone": digest([("alone", alone)])}), flush=True)
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
