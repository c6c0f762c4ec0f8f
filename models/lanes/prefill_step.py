"""How many tokens of a prompt are read at once where nobody says it.

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
