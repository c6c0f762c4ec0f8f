"""Probe of an MTP head's training convention, by its agreement with its target.

The target writes a short text. For each candidate convention, the head reads the
target's states and tokens and guesses that text. The probe starts from the usual
convention and changes one field at a time until no change is surely better. If the
result is no better than chance, all combinations are tried. The recycled state affects
only the second draft, so that field is decided last, by the second draft.

Some files store a few norms in another form than the rest and do not say so, which
costs acceptance. If the head's agreement is not high, the probe changes the form of one
group of norms at a time. It compares these candidates on a longer passage, since norms
of queries and keys have little effect in a short text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_speculation.caches import Speculation
from mlx_speculation.errors import ConventionError
from mlx_speculation.models.checkpoints.convention import (
    MIXED_NORMS,
    NORM_NAMES,
    MtpConvention,
    Norms,
    Order,
    Side,
)
from mlx_speculation.models.checkpoints.draft_checkpoint import Weights
from mlx_speculation.models.checkpoints.draft_head import HeadOutput
from mlx_speculation.models.checkpoints.probe import Score, Trials
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.mtp.head import Mtp, MtpHead
from mlx_speculation.models.mtp.transforms import with_ones

# Positions of each row whose second drafts are scored; each takes forwards of its own.
SECOND_DRAFTS = 8
# From this agreement on, mixed norms are not tried.
HIGH_AGREEMENT = 0.9
# Norms whose form is changed together. norm_e and norm_h are also changed as a pair:
# their ratio counts, so changing one alone may score worse.
GROUPS = (
    ("norm_e", "norm_h"),
    ("norm_e",),
    ("norm_h",),
    ("input_layernorm",),
    ("post_attention_layernorm",),
    ("q_norm", "k_norm"),
    ("final",),
)
# Mixed norms have to win by more than other fields: there are many candidates, and the
# form that the files state for all norms is usually right.
MIXTURE_CERTAINTY = 3.0  # standard errors
MIXTURE_GAIN = 0.05  # nats


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a probe.

    Attributes:
        convention: the best convention.
        first: the score of each candidate at the first draft.
        second: likewise at the second draft; empty if that was not probed.
    """

    convention: MtpConvention
    first: Mapping[MtpConvention, Score]
    second: Mapping[MtpConvention, Score]

    def lines(self) -> list[str]:
        """Return the candidates and their scores, the best first."""
        ranked = sorted(self.first.items(), key=lambda item: -item[1].mean)
        return [f"{described(convention)}: {score}" for convention, score in ranked]


def described(convention: MtpConvention) -> str:
    """Return a convention in a few words, without its recycled state."""
    norms = convention.norms
    said = norms if isinstance(norms, str) else "plus_one: " + "+".join(norms or ())
    return f"hidden {convention.hidden}, {convention.order}, norms {said}"


class HeadProbe:
    """Scores of one head on a text; the head keeps the convention that was tried last.

    Args:
        head: the head, its weights quantized or dequantized as they will be used.
        stored: the weights of its norms as they are stored.
        ends: the embedding and output layer of its target.
        text: the text that the target wrote or read.
    """

    def __init__(
        self, head: MtpHead, stored: Weights, ends: HiddenStates, text: OwnText
    ) -> None:
        self._head, self._stored, self._text = head, stored, text
        self._mtp = Mtp(head, ends)
        flat: Any = tree_flatten(head.parameters())
        self._dtypes = {name: value.dtype for name, value in flat if name in stored}
        self.norms = frozenset(name.split(".")[-2] for name in stored)  # their names

    def assume(self, convention: MtpConvention) -> None:
        """Give the head this convention, norms included."""
        assert convention.norms is not None
        applied = with_ones(self._stored, convention.norms)
        weights = [(n, w.astype(self._dtypes[n])) for n, w in applied.items()]
        self._head.load_weights(weights, strict=False)
        self._head.assume(convention)

    def first(self, convention: MtpConvention) -> Score:
        """Score the first drafts: position i guesses token i + 2."""
        first = max(self._text.written, 2)
        out = self._rows(convention, self._text.positions - 2)
        return self._text.score(out.logits[:, first - 2 :], first)

    def second(self, convention: MtpConvention) -> Score:
        """Score the second drafts, which read the head's states of the first."""
        first = max(self._text.written, 3)
        if self._head.chained:
            return self._text.score(self._chain(convention)[:, first - 3 :], first)
        stop = min(first + SECOND_DRAFTS, self._text.positions)
        return self._text.score(self._again(convention, first, stop), first)

    def _rows(self, convention: MtpConvention, positions: int) -> HeadOutput:
        """Run the first layer over positions 0 to `positions`, in new caches."""
        self.assume(convention)
        hidden, tokens = self._pairs(convention, 0, positions)
        return self._mtp.rows(hidden, tokens, self._head.new_caches()[0])

    def _pairs(
        self, convention: MtpConvention, start: int, stop: int
    ) -> tuple[mx.array, mx.array]:
        after = convention.hidden == "after_norm"
        hidden = self._text.after_norm if after else self._text.before_norm
        return hidden[:, start:stop], self._text.tokens[:, start + 1 : stop + 1]

    def _chain(self, convention: MtpConvention) -> mx.array:
        """Return layer 1's logits on layer 0's states, [rows, positions, vocab]."""
        positions = self._text.positions - 3
        out = self._rows(convention, positions)
        tokens = self._text.tokens[:, 2 : positions + 2]
        caches = self._head.new_caches()[1]
        return self._mtp.rows(out.recycled, tokens, caches, layer=1).logits

    def _again(self, convention: MtpConvention, first: int, stop: int) -> mx.array:
        """Return logits of second drafts for tokens [first, stop).

        For each, the cache holds the text before it; the drafted position is undone.
        """
        self.assume(convention)
        caches, result = self._head.new_caches()[0], []
        if first > 3:
            self._mtp.history(*self._pairs(convention, 0, first - 3), caches)
        for position in range(first - 3, stop - 3):
            pair = self._pairs(convention, position, position + 1)
            recycled = self._mtp.rows(*pair, caches).recycled
            token = self._text.tokens[:, position + 2 : position + 3]
            with Speculation(caches) as drafted:
                out = self._mtp.step(recycled, token, drafted.caches)
                mx.eval(out.logits)
            result.append(out.logits)
        return mx.concatenate(result, axis=1)


def probe(
    trial: HeadProbe,  # the head on a text
    # The convention unless another is surely better; its norms are not None
    usual: MtpConvention,
    free: Sequence[str],  # the fields that are not known
    *,
    source: str,  # where the head is, for messages
    # Makes a probe of the head on a passage; None: its norms cannot be mixed
    on_passage: Callable[[], HeadProbe] | None = None,
) -> Probed:
    """Find the convention of a head, and give it to the head.

    Raises:
        ConventionError: no candidate is above chance.
    """
    trials = Trials(trial.first)
    best = _climbed(trials, usual, free)
    if not trials.score(best).above_chance:  # one change at a time was not enough
        every = [usual]
        for changes in _changes(free):
            every += [other for each in every for other in changes(each)]
        if on_passage is not None:
            alike = [each for each in every if each.norms == usual.norms]
            every += [m for each in alike for m in _mixtures(each, trial.norms)]
        best = _climbed(trials, max(every, key=lambda c: trials.score(c).mean), free)
    if on_passage is not None and trials.score(best).agreement < HIGH_AGREEMENT:
        forms = _other_norms(best) if "norms" in free else []
        mixed = _unmixed(trials, best, forms, on_passage())
        if mixed != best:  # the other fields were judged with the wrong norms
            best = _climbed(trials, mixed, [name for name in free if name != "norms"])
    if not trials.score(best).above_chance:
        raise ConventionError(_refusal(Probed(best, trials.scores, {}), source))
    second = Trials(trial.second)
    if "recycled" in free:
        best = second.best(best, _others(best, "recycled", get_args(Side)))
    trial.assume(best)
    return Probed(best, trials.scores, second.scores)


def _climbed(
    trials: Trials[MtpConvention], best: MtpConvention, free: Sequence[str]
) -> MtpConvention:
    """Change one field at a time until no change is surely better."""
    before = None
    while best != before:
        before = best
        for changes in _changes(free):
            best = trials.best(best, changes(best))
    return best


def _unmixed(
    trials: Trials[MtpConvention],  # on the target's own text
    best: MtpConvention,  # the best so far
    forms: list[MtpConvention],  # other conventions in which a group may change
    on_passage: HeadProbe,
) -> MtpConvention:
    """Change one group of norms at a time, in at most one pass for each group."""
    read = Trials(on_passage.first)
    limits = {"certainty": MIXTURE_CERTAINTY, "gain": MIXTURE_GAIN}
    for _ in GROUPS:
        near = list(forms)
        for each in (best, *forms):
            near += _mixtures(each, on_passage.norms)
        other = read.best(best, near, **limits)
        if other == best or trials.score(best).surely_above(trials.score(other)):
            break
        best, forms = other, []
    return best


def _mixtures(best: MtpConvention, names: frozenset[str]) -> list[MtpConvention]:
    """Return one candidate for each group, with that group in the other form.

    Args:
        best: the convention to change.
        names: the names of the norms that the head has.
    """
    listed = best.norms if isinstance(best.norms, tuple) else ()
    plus_one = names if best.norms == "plus_one" else names.intersection(listed)
    candidates = []
    for group in GROUPS:
        if names.isdisjoint(group):
            continue
        changed = plus_one ^ names.intersection(group)
        mixed = tuple(name for name in NORM_NAMES if name in changed)
        norms: Norms = "plus_one" if changed == names else mixed or "stored"
        candidates.append(replace(best, norms=norms))
    return candidates


def _changes(free: Sequence[str]) -> Iterator[Any]:
    if "order" in free:
        yield lambda best: _others(best, "order", get_args(Order))
    if "norms" in free:
        yield _other_norms
    if "hidden" in free:
        yield lambda best: _others(best, "hidden", get_args(Side))


def _others(
    best: MtpConvention, name: str, values: Sequence[str]
) -> list[MtpConvention]:
    now = getattr(best, name)
    changes: list[dict[str, Any]] = [{name: value} for value in values if value != now]
    return [replace(best, **change) for change in changes]


def _other_norms(best: MtpConvention) -> list[MtpConvention]:
    """Return the candidates with other norms: stored, plus_one and `MIXED_NORMS`."""
    values: set[Norms] = {"stored", "plus_one", MIXED_NORMS}
    values.discard(best.norms or "stored")
    return [replace(best, norms=norms) for norms in sorted(values, key=str)]


def _refusal(result: Probed, source: str) -> str:
    lines = "\n  ".join(result.lines())
    return (
        f"The MTP head in {source} guesses its target's own text by no convention:\n"
        f"  {lines}\n"
        "It may belong to another model. Name what it was trained with, as "
        'convention=MtpConvention(hidden="after_norm", ...), or choose another drafter.'
    )
