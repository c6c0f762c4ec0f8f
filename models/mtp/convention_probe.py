"""Probe of an MTP head's training convention, by the head's agreement with its target.

The target writes a short text. For each candidate convention, the head reads the
target's states and tokens and guesses that text. The candidates are all combinations of
values of the unknown fields. A field keeps its usual value unless another value is
significantly better. The field `recycled` affects only the second drafted token, so it
is decided last.

Some converters leave a few norms in another form than the rest. The probe tries these
mixed forms if the form is unknown and the head's agreement is not high.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_speculation.errors import ConventionError
from mlx_speculation.models.checkpoints.convention import (
    MIXED_NORMS,
    MtpConvention,
    Order,
    Side,
)
from mlx_speculation.models.checkpoints.draft_checkpoint import Weights
from mlx_speculation.models.checkpoints.probe import Score, Trials
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.mtp.head import Mtp, MtpHead
from mlx_speculation.models.mtp.transforms import with_ones

# The second drafted token is scored at this many positions in each row of `OwnText`.
SECOND_DRAFTS = 8
# If the agreement is at least this, norms in mixed forms are not tried.
HIGH_AGREEMENT = 0.9
_VALUES: Mapping[str, Sequence[Any]] = {
    "order": get_args(Order),
    "hidden": get_args(Side),
    "norms": ("stored", "plus_one", MIXED_NORMS),
}
_MIXTURES = [
    names
    for count in range(1, len(MIXED_NORMS) + 1)
    for names in combinations(MIXED_NORMS, count)
]
# Mixed norms have to win by more than other fields, since there are many candidates.
MIXTURE_CERTAINTY = 3.0  # standard errors
MIXTURE_GAIN = 0.05  # nats


class HeadProbe:
    """Scores of one head on a text; the head keeps the convention that was tried last.

    `stored` has the weights of the head's norms as they are stored.
    """

    def __init__(
        self, head: MtpHead, stored: Weights, ends: HiddenStates, text: OwnText
    ) -> None:
        self._head, self._stored, self._text = head, stored, text
        self._mtp = Mtp(head, ends)
        flat: Any = tree_flatten(head.parameters())
        self._dtypes = {name: value.dtype for name, value in flat if name in stored}

    def assume(self, convention: MtpConvention) -> None:
        """Give the head this convention, norms included."""
        assert convention.norms is not None
        applied = with_ones(self._stored, convention.norms)
        weights = [(n, w.astype(self._dtypes[n])) for n, w in applied.items()]
        self._head.load_weights(weights, strict=False)
        self._head.assume(convention)

    def first(self, convention: MtpConvention) -> Score:
        """Score the first drafted tokens: position i guesses token i + 2."""
        self.assume(convention)
        text, first = self._text, max(self._text.written, 2)
        hidden = getattr(text.states, convention.hidden)[:, :-1]
        caches = self._head.new_caches()[0]
        logits = self._mtp.rows(hidden, text.tokens[:, 1:-1], caches).logits
        return text.score(logits[:, first - 2 :], first)

    def second(self, convention: MtpConvention) -> Score:
        """Score the second drafted tokens, which the head makes from its own states."""
        self.assume(convention)
        text, first = self._text, max(self._text.written, 3)
        drafted, hidden = [], getattr(text.states, convention.hidden)
        for guessed in range(first, min(first + SECOND_DRAFTS, text.positions)):
            layers, last = self._head.new_caches(), guessed - 1
            out = self._mtp.rows(
                hidden[:, : last - 1], text.tokens[:, 1:last], layers[0]
            )
            if self._head.chained:
                tokens = text.tokens[:, 2:guessed]
                out = self._mtp.step(out.recycled, tokens, layers[1], layer=1)
            else:
                token = text.tokens[:, last:guessed]
                out = self._mtp.step(out.recycled[:, -1:], token, layers[0])
            mx.eval(out.logits)
            drafted.append(out.logits)
        return text.score(mx.concatenate(drafted, axis=1), first)


def probe(
    trial: HeadProbe,
    # The result, unless another is significantly better; its norms are not None
    usual: MtpConvention,
    free: Sequence[str],  # the fields that are not known
    *,
    source: str,  # where the head is, for messages
) -> MtpConvention:
    """Find the convention of a head, and give it to the head.

    Raises:
        ConventionError: no candidate is above chance.
    """
    trials = Trials(trial.first)
    best = _best(trials, usual, free)
    if "norms" in free and trials.score(best).agreement < HIGH_AGREEMENT:
        mixed = [replace(best, norms=names) for names in _MIXTURES]
        best = trials.best(best, mixed, certainty=MIXTURE_CERTAINTY, gain=MIXTURE_GAIN)
    if not trials.score(best).above_chance:
        raise ConventionError(_refusal(trials, source))
    if "recycled" in free:
        others = [replace(best, recycled=side) for side in get_args(Side)]
        best = Trials(trial.second).best(best, others)
    trial.assume(best)
    return best


def _best(
    trials: Trials[MtpConvention], usual: MtpConvention, free: Sequence[str]
) -> MtpConvention:
    """Return the usual convention, changed in those fields where this is better."""
    names = [name for name in _VALUES if name in free]
    every = [
        replace(usual, **dict(zip(names, values, strict=True)))
        for values in product(*(_VALUES[name] for name in names))
    ]
    best = max(every, key=lambda each: trials.score(each).mean)
    for name in names:
        change: dict[str, Any] = {name: getattr(usual, name)}
        best = trials.best(replace(best, **change), [best])
    return best


def _refusal(trials: Trials[MtpConvention], source: str) -> str:
    ranked = sorted(trials.scores.items(), key=lambda item: -item[1].mean)
    lines = []
    for tried, score in ranked:
        norms = tried.norms
        said = norms if isinstance(norms, str) else f"plus_one: {'+'.join(norms or ())}"
        lines.append(f"\n  hidden {tried.hidden}, {tried.order}, norms {said}: {score}")
    return (
        f"The MTP head in {source} does not predict its target's text with any "
        f"convention:{''.join(lines)}\n"
        "It may belong to another model. Name the convention of its training, as "
        'convention=MtpConvention(hidden="after_norm", ...), or choose another drafter.'
    )
