"""Many combinations of parameters in one test, where each takes a moment.

A test of its own costs a few milliseconds, so a grid of hundreds of small cases is
played in one. A combination that fails is named in the note of its error.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Call a test with every combination of values, until one fails.

    Fixtures serve all of them, so it is not for tests that patch or write to a folder.

    Args:
        values: those of each parameter, by its name.
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
