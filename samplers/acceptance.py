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
        drafted: uint32 [..., k].
        choices: uint32 [..., k + 1], the target's choice after each row.

    Returns:
        int32 [...], from 0 to k.
    """
    agree = (drafted == choices[..., :-1]).astype(mx.int32)
    return mx.cumprod(agree, axis=-1).sum(axis=-1).astype(mx.int32)


def normalizers(logits: mx.array) -> mx.array:
    """Return what turns logits into log-probabilities, when subtracted.

    It also shows whether a token can be chosen: it is not finite where a row holds
    a NaN or plus infinity, or nothing but minus infinity. The largest value alone
    would not: it is known to carry a NaN along on some devices only. [rows, vocab] to
    [rows], of the logits' dtype.
    """
    return mx.logsumexp(logits, axis=-1)


def peaks(logits: mx.array) -> mx.array:
    """Return the largest logits: finite in the rows in which `normalizers` are.

    They also show whether a token can be chosen, for a fifth of the time on a CPU,
    where each exponential counts. [rows, vocab] to [rows]; NaN where a row holds one.
    """
    largest = logits.max(axis=-1)
    if mx.default_device() == mx.cpu or mx.cuda.is_available():
        return largest  # which carries a NaN along: the tests try it
    nan = mx.array(mx.nan, logits.dtype)
    return mx.where(mx.isnan(logits).any(axis=-1), nan, largest)
