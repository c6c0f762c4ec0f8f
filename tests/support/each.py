"""Runs many quick combinations of parameters in one test.

A parametrized test would cost a few milliseconds for each case.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Call a test with every combination of values, until one fails.

    All combinations share the fixtures, so the test must not patch or write anything.
    """
    lists = {name: list(of) for name, of in values.items()}
    assert all(lists.values()), "a parameter without values would test nothing"

    def decorate(test: Callable[..., None]) -> Any:
        @wraps(test)
        def every(**fixtures: Any) -> None:
            for chosen in product(*lists.values()):
                case = dict(zip(lists, chosen, strict=True))
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name not in lists]
        assert len(others) + len(lists) == len(signature.parameters)
        every.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return every

    return decorate
