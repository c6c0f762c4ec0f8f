"""A pytest plugin: one coverage context per test, and each test's time.

What runs outside a test (imports, collecting) or serves several tests (fixtures of a
wider scope and what follows the last test) is recorded under no name: it counts for
every test of the process. Cached functions of the package forget their results before
each test, as otherwise only the first caller would be seen to run them.
"""

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

SHARED = ""
_tests: dict[str, dict[str, float | bool]] = {}


def _switch(context: str) -> None:
    current = Coverage.current()
    assert current is not None
    current.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record what a test runs under its name."""
    _forget(os.environ["MUTATION_FOLDER"])
    _tests[item.nodeid] = {"passed": True}
    _switch(item.nodeid)
    start = time.perf_counter()
    try:
        return (yield)
    finally:
        _tests[item.nodeid]["seconds"] = round(time.perf_counter() - start, 4)
        _switch(SHARED)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    """Record the fixtures of a wider scope for all tests."""
    if fixturedef.scope == "function":
        return (yield)
    _switch(SHARED)
    try:
        return (yield)
    finally:
        _switch(next(reversed(_tests)))  # the test that runs now: the last one begun


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    nextitem: pytest.Item | None,
) -> Generator[None, None, None]:
    """Record what ends the fixtures of a wider scope for all tests."""
    if nextitem is None:
        _switch(SHARED)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure, of a fixture too."""
    if report.failed:
        _tests[report.nodeid]["passed"] = False


def pytest_sessionfinish() -> None:
    """Hand over the times."""
    Path(os.environ["MUTATION_TESTS"]).write_text(json.dumps(_tests), encoding="utf-8")


def _forget(folder: str) -> None:
    """Empty the caches of the functions of a folder's modules."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(folder):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
