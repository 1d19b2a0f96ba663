"""Groups on unlike machines hold the same bits: what depends on the hardware is computed once and sent to all.

One machine plays two: a process that may not use AVX-512 and has one thread, and one that may and has two.
"""

import json
import os
import subprocess
import sys

import pytest
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.slow

NUM_ROUNDS = 20
AVX2_ONLY = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
RULES = {
    "newton_schulz": {"isotropic": "newton_schulz", "scale": "rms"},
    "svd": {"isotropic": "svd"},
    "newton_schulz_of_the_update": {"isotropic": "newton_schulz", "scale": "nuclear", "target": "update"},
}


@pytest.mark.parametrize("rule", RULES)
def test_groups_on_unlike_hardware_hold_the_same_bits_after_every_round(rule: str) -> None:
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=10, heartbeat_timeout_ms=5000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    processes = []
    try:
        for replica_id, environment in enumerate((AVX2_ONLY, {})):
            threads = {"OMP_NUM_THREADS": str(1 + replica_id), "MKL_NUM_THREADS": str(1 + replica_id)}
            arguments = [str(replica_id), address, str(NUM_ROUNDS), str(1 + replica_id), json.dumps(RULES[rule])]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.unlike_group", *arguments],
                    env=os.environ | environment | threads | {"RUST_LOG": "error"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        weak, strong = (json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes)
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    assert len(weak["digests"]) == NUM_ROUNDS
    assert weak["digests"] == strong["digests"]
    if weak["alone"] == strong["alone"]:
        pytest.skip("both processes compute alike on this machine, so that they agree shows nothing")
