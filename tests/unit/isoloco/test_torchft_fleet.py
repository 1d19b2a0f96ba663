"""What of the torchft fleet needs no other process. The rest: tests/distributed/test_torchft_fleet.py."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from isoloco import torchft_fleet


def test_who_waits_is_told_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(torchft_fleet, "SECONDS_BETWEEN_WAIT_MESSAGES", 0.01)
    caplog.set_level(logging.INFO, logger="isoloco")
    told = Event()
    monkeypatch.setattr(caplog.handler, "handle", told_through(caplog.handler.handle, told))
    with ThreadPoolExecutor(1) as thread:
        under_way = torchft_fleet._UnderWay(thread.submit(lambda: told.wait(60)), "groups 1, 2")
        assert under_way.wait() is True
    assert "waiting for groups 1, 2, for 0 s now" in caplog.text


def told_through(handle, told):
    def handle_and_tell(record):
        handled = handle(record)
        told.set()
        return handled

    return handle_and_tell


def test_a_failure_under_way_is_raised_to_who_waits():
    def fail():
        raise TimeoutError("the peer did not answer")

    with ThreadPoolExecutor(1) as thread, pytest.raises(TimeoutError, match="did not answer"):
        torchft_fleet._UnderWay(thread.submit(fail), "groups 1").wait()
