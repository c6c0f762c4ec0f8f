"""Runs many quick combinations of parameters in one test.

A parametrized test costs a few milliseconds for each case, which is much for hundreds
of small cases. If a combination fails, a note on the error names the combination.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Call a test with every combination of values, until one fails.

    All combinations share the fixtures of the test, so a test that patches something or
    writes to a folder cannot use `each`.

    Args:
        values: the values of each parameter, by its name.
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
