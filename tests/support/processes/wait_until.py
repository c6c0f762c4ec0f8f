"""Waiting for what another thread does."""

import time
from collections.abc import Callable


def until(met: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that has to come."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
