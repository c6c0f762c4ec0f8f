"""Waiting for a condition that another thread fulfils."""

import time
from collections.abc import Callable


def until(met: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
