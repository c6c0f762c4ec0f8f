"""Signals that wait until a step is done.

Python runs the handler of a signal between any two bytecodes of the main thread, so
Ctrl-C can raise after a round was committed and before its tokens were counted. Inside
`DeferredSignals` handlers that are written in Python wait:

    with DeferredSignals(checkpoints=True):
        while read_a_chunk():
            checkpoint()        # a signal that has come meanwhile is handled here,
        run_a_round()           # but not in here,
                                # and one that came later when the block is left

A handler that raises then raises from `checkpoint` or from the `with` statement. In
other threads, which no handler runs in, both do nothing.

Python drops what is raised in a finalizer. `finalize` is the body of one: what a
handler raises meanwhile is raised afterwards, in the code that the finalizer had
interrupted. Only a handler that runs before the first instruction of a finalizer is
out of reach. Once Python empties its modules it does nothing: `close_at_exit` has
cleaned up before that.
"""

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

# SIGPROF is left alone: a profiler wants to know where the program is now.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
_IMPATIENT = 2.0  # seconds after which the same signal again does not wait any more

# `signal` wraps these two to turn numbers into enums, which takes 20 times as long.
_plain: Any = sys.modules.get("_signal", signal)
_get, _set = _plain.getsignal, _plain.signal

# All of these are changed by the main thread alone.
_open: list[bool] = []  # of each block that was entered: whether it has checkpoints
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
_waiting: dict[int, float] = {}  # signals, and when they came
_raised: list[int] = []  # the id of what a handler has raised last

_left_open: dict[int, tuple[ExitStack, threading.Thread]] = {}

_AFTER_FINALIZERS = 1e-3  # seconds


class DeferredSignals:
    """A block in which Python's signal handlers wait; blocks may be nested.

    A signal that comes again after two seconds is handled at once: whatever runs then
    hangs, or its user believes so. Entering and leaving takes 2 microseconds.

    Args:
        checkpoints: whether `checkpoint` handles them earlier, if all blocks around it
            say so.
    """

    __slots__ = ("_checkpoints", "_main")

    def __init__(self, *, checkpoints: bool = False) -> None:
        self._checkpoints = checkpoints

    def __enter__(self) -> None:
        self._main = _in_main_thread()
        if not self._main:
            return
        if _open:
            _open.append(self._checkpoints)
            return
        try:
            _raised.clear()
            _open.append(self._checkpoints)
            for number in _NUMBERS:
                handler = _get(number)
                if callable(handler) and handler is not _receive:
                    _handlers[number] = handler
                    _set(number, _receive)
        except BaseException:  # of a signal that came meanwhile
            _restore()
            raise

    def __exit__(self, *error: object) -> None:
        if not self._main:
            return
        if len(_open) > 1:
            _open.pop()
            return
        try:
            _restore()
        except BaseException:
            _restore()
            raise
        if _waiting:
            _handle()


def checkpoint() -> None:
    """Handle the signals that wait, where all is consistent and nothing is lost."""
    if _waiting and all(_open) and _in_main_thread():
        _handle()


def raised_by_signal(error: BaseException) -> bool:
    """Return whether a handler has raised this from the innermost outer block."""
    return id(error) in _raised


def finalize(
    clean_up: Callable[[], object],
    ending: Callable[[], bool] = sys.is_finalizing,  # bound: globals are None then
) -> None:
    """Clean up in a finalizer, and let no signal that comes meanwhile be lost.

    Args:
        clean_up: called once, inside `DeferredSignals`. What it raises goes up, and
            Python reports it.
        ending: whether modules may be empty; then nothing is done.
    """
    if ending():
        return
    fault: Exception | None = None
    started = False
    try:
        with DeferredSignals():
            started = True
            try:
                clean_up()
            except Exception as error:
                fault = error
    except BaseException as error:  # of a handler
        _raise_later(error)
        if not started:
            finalize(clean_up)
    if fault is not None:
        raise fault


def close_at_exit(stack: ExitStack) -> None:
    """Let a stack that is left open be closed before Python empties its modules.

    Context managers in it are generators, which Python would end too late: they call
    what is None then. One that a thread may be using still is left alone.
    """
    _left_open[id(stack)] = stack, threading.current_thread()
    stack.callback(_left_open.pop, id(stack), None)


@atexit.register
def _close_left_open() -> None:
    for stack, thread in tuple(_left_open.values()):
        if thread is threading.main_thread() or not thread.is_alive():
            finalize(stack.close)


def _raise_later(error: BaseException) -> None:
    """Raise an error in the main thread when no finalizer runs there.

    SIGINT brings it: that also ends what the thread may wait in. One of the user's is
    as good, and a handler that is set meanwhile gets this one.
    """
    before = _get(signal.SIGINT)
    if before is None:  # nobody could restore it
        raise error

    def handler(number: int, frame: FrameType | None) -> None:
        if _in_finalizer(frame):
            _interrupt_soon()
            return
        _set(signal.SIGINT, before)
        raise error

    _set(signal.SIGINT, handler)
    _interrupt_soon()


def _interrupt_soon() -> None:
    main = threading.main_thread().ident
    timer = threading.Timer(
        _AFTER_FINALIZERS, signal.pthread_kill, (main, signal.SIGINT)
    )
    timer.daemon = True
    timer.start()


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is finalize.__code__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _restore() -> None:
    """Let signals be handled as before; what a handler raises meanwhile goes up."""
    _open.clear()  # first: `_receive` calls the handlers from here on
    for number, handler in _handlers.items():
        if _get(number) is _receive:  # or somebody has set another one
            _set(number, handler)


def _receive(number: int, frame: FrameType | None) -> None:
    """Note a signal; the handler of all that have one."""
    came = _waiting.get(number)
    now = time.monotonic()
    if _open and (came is None or now - came < _IMPATIENT):
        _waiting.setdefault(number, now)
        return
    # Impatient, or the handlers are about to be restored.
    _waiting.pop(number, None)
    _handlers[number](number, frame)


def _handle() -> None:
    """Call the handlers of the signals that wait, all of them."""
    try:
        with ExitStack() as stack:
            for number in reversed([*_waiting]):
                stack.callback(_handlers[number], number, sys._getframe())
            _waiting.clear()
    except BaseException as error:
        _raised[:] = [id(error)]
        raise
