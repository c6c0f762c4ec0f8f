"""Each worker of pytest stays on a core of its own, as far as there are enough."""

import os

import pytest

from support.scheduling import core_of


def test_workers_are_spread_over_the_cores_that_the_process_may_use() -> None:
    cores = [core_of(f"gw{number}", {2, 5, 7}) for number in range(5)]
    assert cores == [2, 5, 7, 2, 5]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or "PYTEST_XDIST_WORKER" not in os.environ,
    reason="workers on Linux alone",
)
def test_a_worker_is_on_its_core() -> None:
    assert len(os.sched_getaffinity(0)) == 1
