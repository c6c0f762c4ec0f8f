"""Batches whose draft is a head: one that knows the texts, or a real one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

from mlx_speculation import BatchGenerator, SpeculativeGenerator
from mlx_speculation.engine import EagleDraft, MtpDraft, MtpDrafter
from mlx_speculation.engine.shared_drafters.shared_head import SharedHead
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints import HeadOutput
from mlx_speculation.models.checkpoints.draft_head import HeadOnTarget
from mlx_speculation.models.mtp import MtpHead
from support.drafters.batches import (
    LONGEST,
    MODELS,
    PROMPTS,
    SAMPLINGS,
    Bench,
    Case,
    noisy,
    run,
)
from support.identity import prompt_of
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import LAYOUTS, family, make
from support.models.tiny_models import build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

KNOWING = ("mtp", "eagle", "sliding", "reduced")
VOCAB = 256
# Tolerance for a state; the states of two positions differ by more.
CLOSE = 0.05
_OWN = 1000.0  # the head's own states are this plus a code of text and position

Floats = NDArray[np.float32]


@dataclass(eq=False)
class KnownTexts:
    """Texts, and the target's states at all their positions."""

    texts: list[list[int]]  # prompt and continuation
    states: Floats  # [positions, dim], of all texts in order
    starts: list[int]  # index in `states` at which each text begins

    def at(self, state: Floats) -> list[tuple[int, int]]:
        """Return texts and positions with this state: several if texts begin alike."""
        near = np.abs(self.states - state).max(axis=1)
        places = np.nonzero(near < CLOSE * np.abs(state).max())[0]
        matches = []
        for place in places.tolist():
            text = int(np.searchsorted(self.starts, place, side="right")) - 1
            matches.append((text, place - self.starts[text]))
        return matches


@dataclass(eq=False)
class KnowingHead:
    """The attributes of a head that its callers read."""

    window: int | None = None  # size of its sliding window
    ids: mx.array | None = None  # ids of the columns of its logits
    depth: int | None = None  # largest number of tokens that it drafts
    chained: bool = False

    def new_caches(self) -> list[list[Any]]:
        made = RotatingKVCache(self.window) if self.window else KVCache()
        return [[made]]


@dataclass(eq=False)
class KnowingMtp:
    """A head that knows the texts of all rows, and checks its inputs.

    A slot pairs a state with the next token. In committed text the state is the
    target's, in a draft it is the head's state of the slot before. When a draft begins,
    a row's cache must hold the row's text in order. `wrong` returns whether the head
    predicts the token at a position wrong.
    """

    known: KnownTexts
    head: KnowingHead = field(default_factory=KnowingHead)
    wrong: Callable[[int], bool] = lambda position: position % 7 == 3
    fed: list[tuple[str, int, int]] = field(default_factory=list)  # method, rows, slots
    chains: int = 0  # number of drafts; one for all rows of a batch counts once
    unknown: int = 0  # number of rows of these drafts whose first slot is in no text

    def rows(self, *args: Any) -> HeadOutput:
        """Raise: callers of a head with one layer need only its last position."""
        raise AssertionError("all positions were asked for")

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        """Write slots; the caller can discard slots of single rows later."""
        self.fed.append(("history", tokens.shape[0], tokens.shape[1]))
        self._write(hidden, tokens, caches)

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Write slots, check the caches, and predict the token after the last slot."""
        self.fed.append(("step", tokens.shape[0], tokens.shape[1]))
        places = self._write(hidden, tokens, caches)
        cached = _cached_rows(caches[0])
        logits, state_ids = [], []
        for row, (text, position) in enumerate(places):
            if text < 0:  # no text has this state, and the row's draft is not used
                self.unknown += self._first
                logits.append(0)
                state_ids.append(0.0)
                continue
            if self._first:
                self._check(cached[row], text, position)
            logits.append(self._guess(text, position + 2))
            state_ids.append(_OWN + 512.0 * text + position)
        self.chains += self._first
        ids = mx.arange(VOCAB) if self.head.ids is None else self.head.ids
        said = mx.where(ids == mx.array(logits)[:, None], 100.0, -100.0)[:, None]
        state = mx.array(state_ids)[:, None, None]
        return HeadOutput(
            mx.broadcast_to(state, (len(state_ids), 1, hidden.shape[2])), said
        )

    draft = HeadOnTarget.draft

    def _write(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> list[tuple[int, int]]:
        """Write (position, token) of slots; return each row's last (text, position)."""
        values: Floats = np.array(hidden)
        ids: Any = tokens.tolist()
        self._first = not (values[:, -1] >= _OWN).any()
        rows, last = [], []
        for states, paired in zip(values, ids, strict=True):
            row, place = [], (-1, -1)
            for state, token in zip(states, paired, strict=True):
                place = self._place(state, token)
                row.append([float(place[1]), float(token)])
            rows.append(row)
            last.append(place)
        written = mx.array(rows)[:, None]  # [rows, 1, slots, 2]
        caches[0].update_and_fetch(written, written)
        return last

    def _place(self, state: Floats, token: int) -> tuple[int, int]:
        if state[0] >= _OWN and (state == state[0]).all():
            code = int(state[0] - _OWN)
            return code // 512, code % 512 + 1
        for text, position in self.known.at(state):
            if self.known.texts[text][position + 1 : position + 2] == [token]:
                return text, position
        return -1, -1  # padding: in no text

    def _check(self, cached: list[list[int]], text: int, position: int) -> None:
        """Require that a row's cache has its text, or window, up to `position`."""
        tokens = self.known.texts[text]
        whole = [[i, tokens[i + 1]] for i in range(position + 1)]
        window = self.head.window
        if window is not None and len(whole) > window:
            cached, whole = cached[-window:], whole[-window:]
        assert cached == whole, f"held {cached} and not {whole}"

    def _guess(self, text: int, position: int) -> int:
        tokens = self.known.texts[text]
        if position >= len(tokens):
            return 0
        return (tokens[position] + self.wrong(position)) % VOCAB


def _cached_rows(cache: Any) -> list[list[list[int]]]:
    """Return the positions and tokens in each row's cache, in order."""
    keys = cache.keys
    if hasattr(cache, "lengths"):
        each = [keys[row, 0, :n] for row, n in enumerate(cache.lengths)]
    elif hasattr(cache, "left_padding"):  # a ring of several rows
        if cache.rotated:
            keys = mx.roll(keys, -cache._idx, 2)
        else:
            keys = keys[..., : cache._idx, :]
        padding: Any = cache.left_padding.tolist()
        each = [keys[row, 0, max(0, n) :] for row, n in enumerate(padding)]
    else:
        each = [cache.keys_and_values()[0][0, 0]]
    return [[[int(v) for v in pair] for pair in row.tolist()] for row in each]


class HeadBench(Bench):
    def generator(self, kind: str, **options: Any) -> SpeculativeGenerator:
        """Return a generator with a draft of a kind; `batches.Bench` has further kinds.

        "mtp" and "eagle" know the texts. "sliding" is "mtp" with a window; "reduced" is
        "mtp" with only even ids; "random" is an EAGLE-3 head with random weights.
        """
        if kind not in (*KNOWING, "random"):
            return Bench.generator(self, kind, **options)
        random = kind == "random"
        draft = eagle_on(self.model) if random else self.draft_of(kind)[0]
        made: dict[str, Any] = {"draft": draft, "draft_length": 4}
        return SpeculativeGenerator(self.model, byte_tokenizer(), **(made | options))

    def draft_of(self, kind: str) -> tuple[Any, KnowingMtp]:
        """Return a draft with a knowing head in it, and the head."""
        draft: Any
        if kind == "eagle":
            draft = eagle_on(self.model)
            layers, select = draft.eagle.layers, draft.eagle.states
            knowing = KnowingMtp(self.known(kind, select, layers=layers))
            knowing.states = select  # type: ignore[attr-defined]
            draft.eagle = knowing
            return draft, knowing
        head = KnowingHead(window=6 if kind == "sliding" else None)
        if kind == "reduced":
            head.ids = mx.arange(0, VOCAB, 2, mx.uint32)
        convention = family(LAYOUTS["qwen3_5"]).convention
        draft = MtpDraft(self.model, MtpHead([], convention))
        draft._ids = head.ids
        known = self.known("mtp", lambda states: states.after_norm, after_norm=True)
        draft.mtp = KnowingMtp(known, head)
        return draft, draft.mtp

    def known(
        self, kind: str, select: Callable[[Any], mx.array], **options: Any
    ) -> KnownTexts:
        """Return all texts, with the states that this kind of head reads."""
        by_kind: dict[str, KnownTexts] = self.__dict__.setdefault("held", {})
        if kind not in by_kind:
            taps = HiddenStates(self.model, **options)
            by_kind[kind] = self._looked_at(taps, select)
        return by_kind[kind]

    def _looked_at(
        self, taps: HiddenStates, select: Callable[[Any], mx.array]
    ) -> KnownTexts:
        texts, arrays, starts, total = [], [], [], 0
        for tokens in self._all_texts():
            with taps.collect() as states:
                self.model(mx.array([tokens]))
            values = np.array(select(states)[0])
            texts.append(tokens)
            starts.append(total)
            arrays.append(values)
            total += len(values)
        taps.remove()
        return KnownTexts(texts, np.concatenate(arrays), starts)

    def _all_texts(self) -> list[list[int]]:
        """Return all prompts with their texts, decoded in one batch to save time."""
        pairs = [(prompt_of(p), s) for p in PROMPTS for s in SAMPLINGS]
        results = SpeculativeGenerator(self.model, byte_tokenizer()).generate_batch(
            [prompt for prompt, _ in pairs],
            max_tokens=LONGEST,
            each=[{"sampling": sampling} for _, sampling in pairs],
            stop_tokens=(),
            max_rows=len(pairs),
        )
        both = zip(pairs, results, strict=True)
        return [prompt + result.tokens for (prompt, _), result in both]


def knowing(generator: SpeculativeGenerator) -> KnowingMtp:
    draft: Any = generator._setup.draft
    head: Any = draft.eagle if isinstance(draft, EagleDraft) else draft.mtp
    assert isinstance(head, KnowingMtp)
    return head


@cache
def head_bench(name: str) -> HeadBench:
    model = build_tiny(MODELS[name])
    return HeadBench(name, model, noisy(model, name))


def eagle_on(model: Any, dialect: str = "specforge") -> EagleDraft:
    count = len(model.layers)
    layers = (0, 1, 3) if count > 3 else tuple(range(count))
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), dialect, layers)
        return EagleDraft.from_folder(written, model)


@cache
def mtp_on(layout: str) -> tuple[Any, MtpDraft]:
    """Return the target of a checkpoint layout, and a random head for it."""
    _, target, head = make(layout)
    its_family = family(LAYOUTS[layout])
    made = MtpHead(
        head.layers,
        its_family.convention,
        chained=its_family.layers == "chained",
        depth=its_family.depth,
    )
    return target, MtpDraft(cast(Any, target), made)


def drafts_of(generator: SpeculativeGenerator, cases: list[Case]) -> list[Any]:
    """Return each row's result and drafts in a batch."""
    drafted: dict[int, list[list[int]]] = {}
    plain = SharedHead.propose

    def noting(self: Any, requests: Any, limits: Any) -> Any:
        proposed = plain(self, requests, limits)
        together = batch._groups[None].rows
        for row, draft in zip(together, proposed[0], strict=True):
            if draft.length:
                drafted.setdefault(row.uid, []).append(listed(draft.tokens))
        return proposed

    with pytest.MonkeyPatch.context() as patch, BatchGenerator(generator) as batch:
        patch.setattr(SharedHead, "propose", noting)
        uids = [batch.insert(**options_of(case)) for case in cases]
        run(batch)
        assert not batch.stats.alone
        return [(batch.result(uid), drafted[uid]) for uid in uids]


def drafts_alone(generator: SpeculativeGenerator, case: Case) -> Any:
    drafted: list[list[int]] = []
    plain = MtpDrafter.propose

    def noting(self: Any, *args: Any) -> Any:
        proposal = plain(self, *args)
        drafted.append(listed(proposal.tokens))
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpDrafter, "propose", noting)
        result = generator.generate(**options_of(case))
    return result, [draft for draft in drafted if draft]


def options_of(case: Case) -> dict[str, Any]:
    return {
        "prompt": prompt_of(case.prompt),
        "sampling": case.sampling,
        "max_tokens": case.max_tokens,
        "stop_tokens": (),
    }


def listed(tokens: mx.array) -> list[int]:
    result: Any = tokens.tolist()
    return list(result)


def generator_of(target: Any, draft: Any, **options: Any) -> SpeculativeGenerator:
    options.setdefault("draft_length", 3)
    return SpeculativeGenerator(target, byte_tokenizer(), draft=draft, **options)


def compare(generator: SpeculativeGenerator) -> None:
    """Require that rows in a batch draft the same tokens as alone, greedy and keyed."""
    cases = [Case(p, s, 10) for p, s in zip((2, 17, 40), SAMPLINGS[:3], strict=True)]
    for case, (result, drafts) in zip(cases, drafts_of(generator, cases), strict=True):
        alone, expected = drafts_alone(generator, case)
        assert drafts == expected != []
        assert result.tokens == alone.tokens
        assert result.stats.accepted == alone.stats.accepted
        assert result.stats.drafted == alone.stats.drafted
        assert result.stats.rounds == alone.stats.rounds
        assert result.stats.sources.keys() == alone.stats.sources.keys()
