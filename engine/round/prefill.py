"""Prefill: the target reads the prompt; the drafter reads it before its first draft."""

import time
from collections.abc import Callable

from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.round.request import Request


class Prefill:
    """Reads the prompt of a request.

    `drafter_begun` is true once the drafter has read the prompt, or if there is no
    drafter. A round reports and resets `drafter_seconds`, the time of the drafter's
    prefill.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.drafter_begun = request.drafter is None
        self.drafter_seconds = 0.0
        if request.warmup is not None:
            request.warmup.read_prompt = self.drafter

    def target(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Feed all known tokens but the last; return whether all were fed.

        The first round feeds the last token. `fits` returns whether a chunk of n tokens
        may be fed now; None: always.
        """
        started, target = time.perf_counter(), self._request.target
        unseen = self._request.sequence.tokens[target.seen : -1]
        complete = target.feed(unseen, fits=fits)
        self._request.statistics.prefill_seconds += time.perf_counter() - started
        return complete

    def drafter(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Let the drafter read the prompt; return whether all of it was read.

        The first draft needs the whole prompt. `fits` is as for `target`.
        """
        drafter, sequence = self._request.drafter, self._request.sequence
        if self.drafter_begun or drafter is None:
            return True
        started = time.perf_counter()
        complete = True
        if fits is not None:
            complete = drafter.read_ahead(sequence, fits)
        if complete:
            drafter.begin(sequence)
            self.drafter_begun = True
        seconds = time.perf_counter() - started
        self._request.statistics.prefill_seconds += seconds
        self.drafter_seconds += seconds
        if complete and self._request.warmup is not None:
            request = self._request
            choices = CheckedChoose(request.verifier, request.masks)
            self._request.warmup.draft(drafter, sequence, choices)
        return complete
