"""Chunks of prompts: their usual length, and a budget of tokens between rounds."""

import mlx.core as mx

PREFILL_STEP = 2048
# On a CPU a chunk of 2048 takes half a minute, and Ctrl-C waits for its end.
CPU_PREFILL_STEP = 256


def usual_prefill_step() -> int:
    """Return the usual number of tokens of a chunk on this device."""
    on_cpu = mx.default_device() == mx.cpu
    return CPU_PREFILL_STEP if on_cpu else PREFILL_STEP


class PrefillBudget:
    """Number of prompt tokens to read between rounds, in one chunk or several.

    A chunk is never split to fit: the last bits of the results can depend on where
    chunks end.
    """

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def fits(self, chunk: int) -> bool:
        """Return whether a chunk of this many tokens fits, and if so subtract them."""
        if chunk > self._left:
            return False
        self._left -= chunk
        return True
