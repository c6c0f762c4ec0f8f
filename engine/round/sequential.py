"""Rows decided one after the other, each when the one before is known to stay.

A logits processor that says nothing of its state is called once for each emitted
token, in order, as in plain decoding. So a row is decided when its drafted token was
accepted and does not end the text, and the host reads each decision.
"""

from collections.abc import Iterator

from mlx_speculation.engine.round.outcome import Emitted, MakeCut, Verdict, verdict_of
from mlx_speculation.samplers import Constrained, Verified


def decide_in_turn(
    turns: Iterator[Verified],
    make_cut: MakeCut,
    text: Constrained | None,
    drafted: int,
) -> tuple[list[Verdict], str | None]:
    """Decide rows up to a rejection, the end of the text, or the last one.

    Args:
        turns: decides on the next row when it is asked for one.
        make_cut: gets each token when it is known.
        text: the text under its constraint, if there is one.
        drafted: how many tokens were drafted.

    Returns:
        The verdict on each row, of one token, and why the text ends there or None.
    """
    verdicts: list[Verdict] = []
    for verified in turns:
        verdicts.append(verdict_of(verified))
        emitted = Emitted.in_turn(verdicts, drafted)
        if text is not None:
            emitted = emitted.under(text)
        reason = make_cut(emitted.last).reason
        if reason is not None or not verdicts[-1].accepted:
            return verdicts, reason
        place = None if text is None else text.place(emitted.tokens)
        if place is not None and not place.goes_on:
            break
    return verdicts, None
