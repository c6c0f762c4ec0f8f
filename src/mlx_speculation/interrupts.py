"""Signal handlers that are deferred until a step is complete.

Python runs the handler of a signal between any two bytecodes of the main thread. So
Ctrl-C can raise an exception between a round's commit and the count of its tokens.
`DeferredSignals` defers all handlers that are written in Python:

    with DeferredSignals(checkpoints=True):
        while read_a_chunk():
            checkpoint()        # handles the signals that have arrived so far
        run_a_round()           # no signal is handled here
    # the end of the block handles the signals that have arrived since

`checkpoint` or the `with` statement raises the exceptions of handlers. In other threads
both do nothing, since Python runs handlers in the main thread only.

Python discards exceptions that a finalizer (`__del__`) raises. In `finalize` the
exceptions of signal handlers are kept, and raised afterwards in the interrupted code.
The exception of a handler that runs before the finalizer's first instruction is lost.
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

# SIGPROF is not deferred: a profiler needs the current position of the program.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
_IMPATIENT = 2.0  # seconds after which a repeated signal is handled at once

# `signal` wraps these two to convert numbers to enums, which takes 20 times as long.
_plain: Any = sys.modules.get("_signal", signal)
_get, _set = _plain.getsignal, _plain.signal

# Only the main thread changes these four.
_open: list[bool] = []  # for each entered block, whether it has checkpoints
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
_waiting: dict[int, float] = {}  # deferred signals, each with its time of arrival
_raised: list[int] = []  # the id of the exception that a handler raised last

_left_open: dict[int, tuple[ExitStack, threading.Thread]] = {}

_AFTER_FINALIZERS = 1e-3  # seconds between two attempts of `_raise_later`


class DeferredSignals:
    """A block that defers Python's signal handlers; blocks may be nested.

    A signal that is repeated after two seconds is handled at once, since the program
    may hang. `checkpoint` handles signals inside the block if this and all enclosing
    blocks have `checkpoints`. A block takes 2 microseconds.
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
        except BaseException:  # raised by the handler of a signal
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
    """Handle the deferred signals; call it where the program's state is consistent."""
    if _waiting and all(_open) and _in_main_thread():
        _handle()


def raised_by_signal(error: BaseException) -> bool:
    """Return whether this error is the last one that a deferred handler raised."""
    return id(error) in _raised


def finalize(
    clean_up: Callable[[], object],
    ending: Callable[[], bool] = sys.is_finalizing,  # globals are None at exit
) -> None:
    """Clean up in a finalizer without losing signals that arrive meanwhile.

    `clean_up` is called once. Its exceptions are raised again, and Python reports them.
    While Python is shutting down (`ending`), `finalize` does nothing.
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
    except BaseException as error:  # raised by a handler
        _raise_later(error)
        if not started:
            finalize(clean_up)
    if fault is not None:
        raise fault


def close_at_exit(stack: ExitStack) -> None:
    """Close a stack that is still open at exit, before Python empties the modules.

    Python would end the stack's generators too late, when their globals are None. The
    stack of a thread that still runs stays open.
    """
    _left_open[id(stack)] = stack, threading.current_thread()
    stack.callback(_left_open.pop, id(stack), None)


@atexit.register
def _close_left_open() -> None:
    for stack, thread in tuple(_left_open.values()):
        if thread is threading.main_thread() or not thread.is_alive():
            finalize(stack.close)


def _raise_later(error: BaseException) -> None:
    """Raise an error in the main thread once no finalizer runs there.

    A temporary handler of SIGINT raises the error, and a SIGINT is sent to that thread.
    The signal also ends a blocking call. If other code has replaced the handler
    meanwhile, the new handler gets the signal.
    """
    before = _get(signal.SIGINT)
    if before is None:  # not set from Python, so it could not be restored
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
    """Restore the handlers; raise what a handler raises meanwhile."""
    _open.clear()  # from here on `_receive` calls the handlers at once
    for number, handler in _handlers.items():
        if _get(number) is _receive:  # else other code has set a handler since
            _set(number, handler)


def _receive(number: int, frame: FrameType | None) -> None:
    """Record a signal, in place of its handler."""
    came = _waiting.get(number)
    now = time.monotonic()
    if _open and (came is None or now - came < _IMPATIENT):
        _waiting.setdefault(number, now)
        return
    # The signal was repeated, or the handlers are being restored.
    _waiting.pop(number, None)
    _handlers[number](number, frame)


def _handle() -> None:
    """Call the handlers of all deferred signals, even if one of them raises."""
    try:
        with ExitStack() as stack:
            for number in reversed([*_waiting]):
                stack.callback(_handlers[number], number, sys._getframe())
            _waiting.clear()
    except BaseException as error:
        _raised[:] = [id(error)]
        raise
