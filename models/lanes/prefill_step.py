"""Chunks of prompts: their usual length, and room for them between rounds.

Chunks of a prompt are the places where Ctrl-C and other requests get their turn.
"""

import mlx.core as mx

PREFILL_STEP = 2048
# On a CPU a chunk of 2048 takes half a minute, and Ctrl-C waits for its end.
CPU_PREFILL_STEP = 256


def usual_prefill_step() -> int:
    """Return the number of tokens on this device."""
    on_cpu = mx.default_device() == mx.cpu
    return CPU_PREFILL_STEP if on_cpu else PREFILL_STEP


class PrefillBudget:
    """Room for one chunk of a prompt, which chunks of several short ones may share.

    A chunk is read as a whole, or waits: where chunks end may decide the last bits.
    """

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def fits(self, chunk: int) -> bool:
        """Take the room for a chunk of so many tokens, if there is as much."""
        if chunk > self._left:
            return False
        self._left -= chunk
        return True
