"""Seconds that blocks of code take, added up by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


@contextmanager
def timed(seconds: dict[str, float], key: str) -> Iterator[None]:
    """Add the seconds that a block takes to ``seconds[key]``, also if it raises."""
    started = monotonic()
    try:
        yield
    finally:
        seconds[key] += monotonic() - started
