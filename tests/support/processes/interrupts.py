"""An exception or a signal at any line or opcode of chosen files, by tracing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@contextmanager
def at_opcode(
    number: int,
    traced: str,
    action: Callable[[], object],
    *,
    skip: tuple[CodeType, ...] = (),
) -> Iterator[list[int]]:
    """Call `action` at the `number`-th opcode of files whose path contains `traced`.

    Opcodes of the code `skip` are not counted. Yields a list of one number, the opcodes
    that remain until the call; after the call it is 0 or negative.
    """
    left = [number]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if traced not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = frame.f_code not in skip
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                action()
        return trace

    outer = sys.gettrace()
    # Python 3.12 reads this attribute of all frames when a trace function is set.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(outer)


def raised_at(
    line: int,
    error: BaseException,
    traced: tuple[str, ...],
    action: Callable[[], object],
    skip: Callable[[FrameType], bool] = lambda frame: False,
) -> BaseException | None:
    """Run `action`; raise `error` at the `line`-th line that it runs under `traced`.

    Returns the exception that left `action`; None if `action` ran fewer lines.
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
