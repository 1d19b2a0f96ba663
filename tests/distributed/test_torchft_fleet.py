"""TorchFTFleet keeps what Fleet promises: real lighthouse, real processes, real gloo."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torchft.coordination import LighthouseServer

from isoloco.fleet import VirtualFleet, sum_in_order
from isoloco.torchft_fleet import LighthouseUnreachableError, wait_for_lighthouse
from tests.distributed.training_groups import SHAPES, contribution, train_toy, use_every_verb
from tests.run_groups import Groups, free_port, running_groups
from tests.unit.isoloco.toy_replica import ToyReplica, make_round, train


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=10, heartbeat_timeout_ms=1500
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def groups() -> Iterator[Groups]:
    with running_groups() as started:
        yield started


def check_the_verbs(groups: Groups, lighthouse: str, ids: list[int]) -> None:
    """torchft orders replica ids as strings: 10 before 2 before 3."""
    started = [groups.start(replica_id, use_every_verb, lighthouse) for replica_id in ids]
    for group in started:
        group.expect("connected")
    for group in started:
        group.say()
    results = {group.replica_id: group.result() for group in started}
    order = sorted(ids)
    for replica_id, result in results.items():
        assert result["members"] == [(i, {"of": i, "text": "θ" * i}) for i in order]
        assert result["local"] == (order.index(replica_id),)
        assert result["votes"] == [True, False, True], "one no is everybody's no, and the next vote is free again"
        assert result["inputs unchanged"]
        for shape, total in zip(SHAPES, result["sums"], strict=True):
            expected = sum_in_order([contribution(i, shape) for i in order])
            assert total.shape == expected.shape
            assert torch.equal(total, expected), shape
        peer = {order[0]: order[1], order[1]: order[0]}.get(replica_id)
        assert result["received"] == ([float(peer)] * 2 if peer is not None else [0.0, 0.0])
    # what all send, all receive; and of all numbers as much as in a ring all-reduce
    sent, received = (sum(result["bytes"][side] for result in results.values()) for side in (0, 1))
    assert sent == received
    assert sent == 2 * (len(ids) - 1) * sum(4 * contribution(0, shape).numel() for shape in SHAPES)


def check_the_rounds(groups: Groups, lighthouse: str, ids: list[int]) -> None:
    settings = {"isotropic": "newton_schulz", "num_replica_groups": len(ids), "bucket_bytes": 40}
    started = [groups.start(replica_id, train_toy, lighthouse, settings) for replica_id in ids]
    for _ in range(4):  # the start, and three rounds
        for group in started:
            group.expect("meeting")
        for group in started:
            group.say()
    replicas = [ToyReplica() for _ in ids]
    simulation = make_round(VirtualFleet(ids), replicas, **settings)  # type: ignore[arg-type]
    train(simulation, replicas)
    for group in started:
        result = group.result()
        assert result["digest"] == simulation.digest()
        assert result["ledger"] == simulation.ledger.state_dict()
        assert [row["participants"] for row in result["history"]] == [sorted(ids)] * 3


def test_two_groups_sum_and_train_like_a_simulation_bit_for_bit(groups: Groups, lighthouse: str) -> None:
    check_the_verbs(groups, lighthouse, [2, 10])
    check_the_rounds(groups, lighthouse, [2, 10])


@pytest.mark.slow
def test_three_groups_sum_and_train_like_a_simulation_bit_for_bit(groups: Groups, lighthouse: str) -> None:
    check_the_verbs(groups, lighthouse, [2, 10, 3])
    check_the_rounds(groups, lighthouse, [2, 10, 3])


class TestLighthouseAddress:
    def test_nobody_there_is_one_line_within_the_timeout(self) -> None:
        address = f"http://127.0.0.1:{free_port()}"
        started = time.monotonic()
        with pytest.raises(LighthouseUnreachableError, match=f"no lighthouse at {address}: .*refused.*Check") as caught:
            wait_for_lighthouse(address, 1.0)
        assert time.monotonic() - started < 3.0
        assert len(str(caught.value).splitlines()) == 1

    def test_a_name_that_is_none_is_one_line_too(self) -> None:
        with pytest.raises(LighthouseUnreachableError, match=r"no lighthouse at http://no\.such\.host\.invalid:1"):
            wait_for_lighthouse("http://no.such.host.invalid:1", 0.5)

    @pytest.mark.parametrize("address", ["127.0.0.1:29510", "https://host:1", "http://host", "http://host:seven", ""])
    def test_an_address_that_is_none_is_refused_at_once(self, address: str) -> None:
        started = time.monotonic()
        with pytest.raises(LighthouseUnreachableError, match="is not of the form http://host:port"):
            wait_for_lighthouse(address, 60.0)
        assert time.monotonic() - started < 1.0

    def test_something_else_that_answers_is_named(self) -> None:
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}"
            with pytest.raises(LighthouseUnreachableError, match=rf"{address}: something else answers there \(HTTP"):
                wait_for_lighthouse(address, 0.5)
            server.shutdown()

    def test_something_that_never_answers_is_one_line_within_the_timeout(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            started = time.monotonic()
            with pytest.raises(LighthouseUnreachableError, match="timed out"):
                wait_for_lighthouse(f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0)
        assert time.monotonic() - started < 4.0

    def test_a_lighthouse_that_comes_late_is_found(self) -> None:
        port = free_port()
        found = threading.Event()

        def find() -> None:
            wait_for_lighthouse(f"http://127.0.0.1:{port}", 30.0)
            found.set()

        threading.Thread(target=find, daemon=True).start()
        assert not found.is_set()
        server = LighthouseServer(bind=f"[::]:{port}", min_replicas=1)
        assert found.wait(30)
        server.shutdown()
