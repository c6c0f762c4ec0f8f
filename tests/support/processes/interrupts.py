"""An exception at any line of chosen files, raised by a trace function."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def raised_at(
    line: int,
    error: BaseException,
    traced: tuple[str, ...],
    action: Callable[[], object],
    skip: Callable[[FrameType], bool] = lambda frame: False,
) -> BaseException | None:
    """Run `action` and raise `error` at the `line`-th line of files under `traced`.

    Returns what came out of `action`; None when it ran fewer lines than that.
    """
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(traced):
            return None
        if event == "line" and not skip(frame):
            left -= 1
            if left == 0:
                raise error
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except BaseException as caught:  # noqa: BLE001, RUF100
        return caught
    finally:
        sys.settrace(outer)
    return None
