"""SIGINT and SIGTERM in commands: orderly end at the first, forced end at the second.

    first     KeyboardInterrupt in the main thread, between two steps
    second    the process ends within two seconds, whatever it does

A long forward or compilation delays Python's handlers. So Python also writes the number
of each signal to a pipe, at once (`signal.set_wakeup_fd`). A thread reads that pipe and
ends the process.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ORDERLY_SECONDS = 1.0  # from the second signal to the forced end
EXIT_SECONDS = 5.0  # time for remaining threads after the end of a command
_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide the cursor
_RESUMED, _LEFT = 0, 255  # written to the pipe, in addition to numbers of signals


class Signals:
    """Signals of one command."""

    def __init__(self, numbers: list[signal.Signals]) -> None:
        self._numbers = numbers
        self._read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.first: int | None = None  # the signal that ends the command

    def interrupt(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.first is None:
            self.first = number
            raise KeyboardInterrupt

    def watch(self) -> None:
        """End the process after the second signal."""
        count, number = 0, _RESUMED
        while count < 2:
            number = os.read(self._read, 1)[0]
            if number == _LEFT:
                os.close(self._read)
                return
            count = 0 if number == _RESUMED else count + (number in self._numbers)
        end_within(ORDERLY_SECONDS, 128 + number)


_current: Signals | None = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the block, unless the process ignores them.

    In other threads than the main one this does nothing.
    """
    global _current
    handlers = {
        each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)
    }
    before = {n: each for n, each in handlers.items() if each is not signal.SIG_IGN}
    if threading.current_thread() is not threading.main_thread() or not before:
        yield
        return
    _current = Signals(list(before))
    threading.Thread(target=_current.watch, name="signals", daemon=True).start()
    wakeup = signal.set_wakeup_fd(_current.pipe, warn_on_full_buffer=False)
    try:
        for each in before:
            signal.signal(each, _current.interrupt)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(_current.pipe, bytes([_LEFT]))
        os.close(_current.pipe)


def resume() -> None:
    """Continue after Ctrl-C; the next signal counts as a first one.

    Raises:
        KeyboardInterrupt: the signal was SIGTERM, which ends the command.
    """
    if _current is None or _current.first is None:
        return
    if _current.first == signal.SIGTERM:
        raise KeyboardInterrupt
    _current.first = None
    os.write(_current.pipe, bytes([_RESUMED]))


def status() -> int:
    """Return the exit status of a command that was interrupted."""
    number = None if _current is None else _current.first
    return 128 + (signal.SIGINT if number is None else number)


def end_within(seconds: float, status: int) -> None:
    """End the process after some seconds, unless it ends earlier by itself."""

    def end() -> None:
        time.sleep(seconds)
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR)
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()
