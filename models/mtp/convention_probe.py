"""Probe of an MTP head's training convention, by its agreement with its target.

The target writes a little text. Over the pairs of its states and tokens the head
guesses that text, once for each candidate: one field of the convention is changed at a
time, from the best so far, until no change is surely better. If that is no better than
chance, all combinations are tried. Which state is recycled shows at the second draft
only, and is judged there, after everything else.

Norms of which some are stored in the other form cost acceptance, and no file says so.
Where a head could guess more they are changed group by group, and judged on a passage:
norms of queries and keys hardly show in a short text.
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

# Places in each row where the second draft is judged; each takes forwards of its own.
SECOND_DRAFTS = 8
# A head that agrees as often as this has little to gain from other norms.
HIGH_AGREEMENT = 0.9
# Norms that change together, since converters tell their form alike; of the two before
# the projection each alone may score worse, as it is their ratio that counts.
GROUPS = (
    ("norm_e", "norm_h"),
    ("norm_e",),
    ("norm_h",),
    ("input_layernorm",),
    ("post_attention_layernorm",),
    ("q_norm", "k_norm"),
    ("final",),
)
# A mixture has to be better by more than other fields: as many as there are groups are
# compared, and what the files say of all norms is usually right.
MIXTURE_CERTAINTY = 3.0  # standard errors
MIXTURE_GAIN = 0.05  # nats


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a probe.

    Attributes:
        convention: the best convention.
        first: the score of each candidate at the first draft.
        second: likewise at the second draft; empty where nothing depends on it.
    """

    convention: MtpConvention
    first: Mapping[MtpConvention, Score]
    second: Mapping[MtpConvention, Score]

    def lines(self) -> list[str]:
        """Return the candidates and their scores, the best first."""
        ranked = sorted(self.first.items(), key=lambda item: -item[1].mean)
        return [f"{described(convention)}: {score}" for convention, score in ranked]


def described(convention: MtpConvention) -> str:
    """Return a convention in a few words, without what is recycled."""
    norms = convention.norms
    said = norms if isinstance(norms, str) else "plus_one: " + "+".join(norms or ())
    return f"hidden {convention.hidden}, {convention.order}, norms {said}"


class HeadProbe:
    """One head on a text; it is left with the convention that was tried last.

    Args:
        head: the head, with quantized and dequantized weights as it will draft.
        stored: the weights of its norms as they are stored.
        ends: on its target.
        text: what the target wrote.
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
        """Make the head one of this convention, norms included."""
        assert convention.norms is not None
        applied = with_ones(self._stored, convention.norms)
        weights = [(n, w.astype(self._dtypes[n])) for n, w in applied.items()]
        self._head.load_weights(weights, strict=False)
        self._head.assume(convention)

    def first(self, convention: MtpConvention) -> Score:
        """Score the first draft: position i guesses token i + 2."""
        first = max(self._text.written, 2)
        out = self._rows(convention, self._text.positions - 2)
        return self._text.score(out.logits[:, first - 2 :], first)

    def second(self, convention: MtpConvention) -> Score:
        """Score the second draft, which reads what the head made for the first."""
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
        """Return what layer 1 makes of layer 0's results: [rows, positions, vocab]."""
        positions = self._text.positions - 3
        out = self._rows(convention, positions)
        tokens = self._text.tokens[:, 2 : positions + 2]
        caches = self._head.new_caches()[1]
        return self._mtp.rows(out.recycled, tokens, caches, layer=1).logits

    def _again(self, convention: MtpConvention, first: int, stop: int) -> mx.array:
        """Return guesses of tokens [first, stop) behind one state of the head's own.

        Every guess stands on true positions, and on one that was drafted and is undone.
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
    # What it is taken to be unless another is surely better; its norms are decided
    usual: MtpConvention,
    free: Sequence[str],  # the fields that are not known
    *,
    source: str,  # where the head is, for messages
    # Makes a probe of the head on a passage, where its norms may be mixed
    on_passage: Callable[[], HeadProbe] | None = None,
) -> Probed:
    """Find the convention of a head, and leave the head with it.

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
    forms: list[MtpConvention],  # others from which norms may differ in a group
    on_passage: HeadProbe,
) -> MtpConvention:
    """Change one group of norms at a time, as often as there are groups at most."""
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
    """Return the candidates in which a group of norms is stored in the other form.

    Args:
        best: the convention that they differ from.
        names: of the norms that the head has.
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
    """Return the candidates that differ in the norms.

    These are all or none that lack their one, and the four that packs leave.
    """
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
