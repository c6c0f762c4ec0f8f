"""Which drafted tokens are accepted.

The words used everywhere in this project:

    drafted     proposed by the drafter, k of them in a round
    accepted    drafted, and confirmed by the target; always a prefix
    correction  the target's own token after a rejected one
    bonus       the target's own token after k accepted ones
    emitted     accepted tokens and the correction or bonus, before any cut
    committed   kept for good; caches hold committed tokens only
"""

import mlx.core as mx


def count_accepted(drafted: mx.array, choices: mx.array) -> mx.array:
    """Count the drafted tokens that equal the target's own choices.

    Both chose with the same noise (keyed choice), or without any (greedy). What is
    emitted is always `choices[: accepted + 1]`, so the draft cannot change the text.

    Args:
        drafted: int32 [k].
        choices: int32 [k + 1], the target's choice after each row.

    Returns:
        int32 [], from 0 to k.
    """
    agree = (drafted == choices[:-1]).astype(mx.int32)
    return mx.cumprod(agree).sum().astype(mx.int32)


def usable_rows(logits: mx.array) -> mx.array:
    """Tell which rows a token can be chosen from.

    Unusable are those with a NaN or plus infinity, or with nothing but minus infinity.

    Args:
        logits: [rows, vocab].

    Returns:
        int32 [rows], 1 where usable.
    """
    # The largest value alone would do where it carries a NaN along, as on a CPU.
    nan = mx.isnan(logits).any(axis=-1)
    return (mx.isfinite(mx.max(logits, axis=-1)) & ~nan).astype(mx.int32)
