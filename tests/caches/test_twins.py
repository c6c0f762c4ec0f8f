"""A cache after any rounds equals a native twin that saw only the kept tokens.

The rounds are drawn by Hypothesis: one to four forwards of one to six rows, then a
commit of any prefix, a rollback, an exception, or any other way to end a round. The
view that a model has during a round is compared with that of a native copy. In every
third round nothing live may be written before the commit (`isolated=True`).

The tests of this folder fail for each of these faults, made by hand (killed by hand):

    kv: the offset is one too far after a commit
    kv: an empty cache is not emptied
    kv: a rollback leaves the offset
    ring: _idx is not restored
    ring: the offset is not restored
    ring: the arrays are not restored
    ring: an overwritten row returns to the next slot
    ring: an overwritten value row is not restored
    ring: writes are undone in the wrong order
    ring: the tail is cut one row short
    ring: the tail is cut and offset stays
    ring: a slot of a small keep is wrapped to 0
    ring: saved rows are trusted after other writes
    ring: saved rows are trusted for other arrays
    ring: saved rows that were undone are kept
    ring: a saved row is read one off
    ring: a write to a cut ring saves no arrays
    arrays: replay with one position more
    arrays: replay starts from the first forward's state
    arrays: lengths are shared, not copied
    arrays: padding is shared, not copied
    arrays: the slot list is shared, not copied
    arrays: only the first mixer of a forward is replayed
    arrays: keep is not lowered by earlier forwards
    arrays: a rollback keeps the committed state
    arrays: a second forward is not told apart
    list: the last member is not committed
    list: the last member is not rolled back
    list: the last layer is not rolled back
    list: members of a list are presented in reverse
    quantized: the offset is one too far after a commit
    quantized: a rollback leaves the offset
    concatenated: the rows stay and the offset moves
    concatenated: values are cut one row short
    concatenated: a rollback leaves the arrays
    chunked: a front trim is not noted
    chunked: start_position is not restored
    chunked: the arrays are not restored
    chunked: the values are not restored
    chunked: a commit undoes no front trim
    chunked: a commit undoes every front trim
    chunked: only the last front trim is undone
    chunked: a front trim at the end of the kept rows stays
    chunked: an empty one is not emptied
    layer: the window is that of the whole write
    layer: replay with one position more
    layer: nothing is replayed
    layer: one group too many
    layer: pending rows are not counted
    layer: index keys stay
    layer: groups are cut from the beginning of the text
    layer: keep is not lowered by earlier writes
    layer: a rollback keeps the written state
    layer: the state after a write is that of the last one
    layer: an unrecorded compressor counts as recorded
    layer: compressed rows from elsewhere are not noticed
    speculation: leaving does not roll back
    speculation: a prepared number wins over the committed one
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models import lfm2
from mlx_lm.models.lfm2 import ShortConv

from mlx_speculation.caches import Speculation, rotating
from mlx_speculation.models import Recorders
from support.cache_twins import (
    ENDINGS,
    ArraysKind,
    Held,
    Kind,
    KVKind,
    ListKind,
    Mixers,
    Plan,
    Rows,
    assert_same,
    detached,
    plans,
    read,
    ring_kinds,
)
from support.more_twins import (
    ConcatenateKind,
    LayerKind,
    attentions,
    chunked_kinds,
    compositions,
    quantized_kinds,
)
from support.tiny_models import TINY_MODELS, build

ROUNDS = 10_000
SMALLER = {"hidden_size": 8}

WIDTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
FEWER = st.lists(st.integers(1, 4), min_size=1, max_size=3)
SINGLE_ROWS = st.lists(st.just(1), min_size=1, max_size=4)
MANY_SINGLE_ROWS = st.integers(1, 40).map(lambda count: [1] * count)
PREFILLS = st.lists(st.integers(1, 20), max_size=2)


class StopError(Exception):
    """What a round ends with when a forward fails."""


class Twins(RuleBasedStateMachine):
    """One cache under speculation, and its twin."""

    rounds = 0
    sound = False

    def layers(self) -> list[Any]:
        """Return the caches as a model would get them."""
        return self.cache if isinstance(self.cache, list) else [self.cache]

    def begin(self, kind: Kind, prefill: list[int]) -> None:
        """Make both caches and give both the same beginning."""
        self.kind = kind
        self.cache, self.twin = kind.make(), kind.make()
        self.position = self.serial = 0
        for width in prefill:
            rows = self.rows(width)
            kind.forward(self.cache, rows)
            self.keep([rows], width)
        self.sound = True

    def rows(self, width: int, after: int = 0) -> Rows:
        """Return rows never seen before, `after` rows past the kept ones."""
        self.serial += width
        return Rows(
            self.position + after, tuple(range(self.serial - width, self.serial))
        )

    def keep(self, written: list[Rows], keep: int, singly: bool = False) -> None:
        """Feed the twin the first `keep` rows of what was written."""
        for rows in written:
            rows = rows.head(min(keep, rows.width))
            keep -= rows.width
            self.position += rows.width
            one_by_one = singly and self.kind.any_width
            for write in rows.singly() if one_by_one else [rows][: rows.width]:
                self.kind.forward(self.twin, write)

    def check(self, probe: int) -> None:
        """Require that no later forward could tell the two caches apart."""
        caches = (self.cache, self.twin)
        found, expected = read([self.kind.content(cache, probe) for cache in caches])
        assert_same(found, expected, "the cache and its twin")

    def play(self, plan: Plan) -> None:
        """Play one round, and compare what the plan says."""
        type(self).rounds += 1
        self.sound = False
        total = sum(plan.widths)
        keep = plan.keep
        if plan.ending in ("whole", "native"):
            keep = total if keep else 0
        if plan.ending == "native":
            keep, written = total, self.write(self.layers(), plan, [])
        else:
            written = self.speculate(plan, keep)
        if ENDINGS[plan.ending]:
            self.keep(written, keep, plan.singly)
        if plan.check:
            self.check(plan.probe)
        self.sound = True

    def speculate(self, plan: Plan, keep: int) -> list[Rows]:
        """Write and end as the plan says; return what was written."""
        views: list[tuple[Any, Any]] = []
        caches = list(self.layers())
        whole = plan.ending == "whole"
        held = Held(caches, values=plan.watch != "never") if plan.isolated else None
        speculation = Speculation(caches, whole=whole, isolated=plan.isolated)
        with ending(plan), speculation as round_:
            written = self.write(round_.caches, plan, views)
            assert round_.written in (sum(plan.widths), None)
            if plan.watch == "before":
                compare(views)
            prepare(round_, plan, keep)
            if held is not None:
                held.assert_unchanged("the live cache before the commit")
            end(round_, plan, keep)
        if held is not None and not ENDINGS[plan.ending]:
            held.assert_unchanged("the live cache after the round")
        if plan.watch == "after":
            compare(views)
        assert all(map(operator.is_, caches, self.layers()))
        return written

    def write(self, caches: list[Any], plan: Plan, views: list[Any]) -> list[Rows]:
        """Write all rows; with `watch`, note the view beside a native copy's."""
        native = detached(self.cache) if plan.watch != "never" else None
        cache = caches if isinstance(self.cache, list) else caches[0]
        written, after = [], 0
        for width in plan.widths:
            rows = self.rows(width, after)
            shown = self.kind.forward(cache, rows)
            if native is not None:
                views.append((shown, self.kind.forward(native, rows)))
            written.append(rows)
            after += width
        return written

    def teardown(self) -> None:
        """Compare once more at the end, however little was compared on the way."""
        if self.sound:
            self.check(1)
            self.check(3)


@contextmanager
def ending(plan: Plan) -> Iterator[None]:
    """Expect the exception that the plan raises inside the round."""
    if plan.ending != "raise":
        yield
        return
    with pytest.raises(StopError):
        yield


def prepare(speculation: Speculation, plan: Plan, keep: int) -> None:
    """Prepare the end of a round, where the plan says so."""
    if plan.ending.startswith("prepare"):
        everything = "all" in plan.ending
        speculation.prepare(sum(plan.widths) if everything else keep)


def end(speculation: Speculation, plan: Plan, keep: int) -> None:
    """End a round as the plan says."""
    if plan.ending == "raise":
        raise StopError
    if "commit" in plan.ending or plan.ending == "whole":
        speculation.commit(keep)
    if "roll back" in plan.ending:
        speculation.rollback()


def compare(views: list[tuple[Any, Any]]) -> None:
    """Require that each forward was shown what the native copy showed."""
    for shown, expected in read(views):
        assert_same(shown, expected, "the view of a forward")


def run(
    kinds: st.SearchStrategy[Kind],
    *,
    widths: st.SearchStrategy[list[int]] = WIDTHS,
    prefills: st.SearchStrategy[list[int]] = PREFILLS,
    share: float = 1.0,
    steps: int = 50,
    rarely: bool = False,
) -> int:
    """Play `share` of `ROUNDS` rounds, or ten times as many in the long profile."""

    class Machine(Twins):
        @initialize(kind=kinds, prefill=prefills)
        def open(self, kind: Kind, prefill: list[int]) -> None:
            self.begin(kind, prefill)

        @rule(plan=plans(widths, rarely))
        def round(self, plan: Plan) -> None:
            self.play(plan)

    profile = settings.default
    assert profile is not None
    wanted = int(share * ROUNDS * profile.max_examples / 100)
    while (missing := wanted - Machine.rounds) > 0:
        # Some examples stop early, so a run may play less than it was asked for.
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=missing // steps + 2, stateful_step_count=steps
            ),
        )
    return Machine.rounds


@pytest.fixture(name="note_rounds")
def _note_rounds(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    return lambda rounds: record_property("rounds", rounds)


@pytest.fixture(name="compressing", scope="module")
def _compressing() -> Iterator[st.SearchStrategy[Kind]]:
    modules = attentions()
    owners = [Recorders(module) for module in modules]
    yield st.builds(LayerKind, st.sampled_from(modules), st.integers(1, 12))
    for owner in owners:
        owner.remove()


@pytest.fixture(name="hooked", scope="module")
def _hooked() -> Iterator[dict[str, Mixers]]:
    models = {name: build(name) for name in ("qwen3_5", "mamba", "rwkv7")}
    conv = ShortConv(lfm2.ModelArgs.from_dict(TINY_MODELS["lfm2"].args | SMALLER), 0)
    owners = [Recorders(model) for model in (*models.values(), conv)]
    rwkv7 = models["rwkv7"].model.layers[0]
    yield {
        "lfm2": Mixers("lfm2", [conv], 1, hidden=8),
        "qwen3_5": Mixers("qwen3_5", [models["qwen3_5"].layers[0].linear_attn], 2),
        "mamba": Mixers("mamba", [models["mamba"].backbone.layers[0].mixer], 2),
        "rwkv7": Mixers("rwkv7", [rwkv7.attn, rwkv7.ffn], 3),
    }
    for owner in owners:
        owner.remove()


def test_a_kv_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(st.sampled_from([1, 4, 8, 256]).map(KVKind), rarely=True))


SMALL_RINGS = ring_kinds(st.integers(1, 12), st.integers(0, 4))


@pytest.mark.parametrize("saved_rows", [1, 3, 64])
def test_a_small_ring_equals_its_twin(
    saved_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    note_rounds: Callable[[int], None],
) -> None:
    monkeypatch.setattr(rotating, "SAVED_ROWS", saved_rows)
    note_rounds(run(SMALL_RINGS, share=0.2))


def test_a_small_ring_that_fills_row_by_row_equals_its_twin(
    monkeypatch: pytest.MonkeyPatch, note_rounds: Callable[[int], None]
) -> None:
    """Few rounds for each ring, since what is hard happens where it wraps first."""
    monkeypatch.setattr(rotating, "SAVED_ROWS", 3)
    rings = ring_kinds(st.integers(2, 6), st.integers(0, 1))
    prefills = st.integers(0, 6).map(lambda count: [1] * count)
    note_rounds(run(rings, widths=SINGLE_ROWS, prefills=prefills, share=0.4, steps=8))


def test_a_ring_wider_than_its_saved_rows_equals_its_twin(
    note_rounds: Callable[[int], None],
) -> None:
    rings = ring_kinds(st.integers(65, 140), st.integers(0, 4))
    prefills = st.lists(st.integers(1, 200), min_size=1, max_size=2)
    widths = st.one_of(MANY_SINGLE_ROWS, WIDTHS)
    note_rounds(run(rings, widths=widths, prefills=prefills, share=0.2))


@pytest.mark.parametrize(
    ("name", "share"), [("lfm2", 0.7), ("qwen3_5", 0.1), ("mamba", 0.1), ("rwkv7", 0.1)]
)
def test_a_recurrent_state_equals_its_twin(
    name: str,
    share: float,
    hooked: dict[str, Mixers],
    note_rounds: Callable[[int], None],
) -> None:
    takes_lengths = name in ("lfm2", "qwen3_5")
    extents = st.none() | st.just(2000) if takes_lengths else st.none()
    paddings = st.none() | st.integers(1, 5) if takes_lengths else st.none()
    kinds = st.builds(ArraysKind, st.just(hooked[name]), extents, paddings)
    note_rounds(
        run(
            kinds,
            prefills=st.lists(st.integers(1, 4), max_size=1),
            share=share,
            rarely=name == "lfm2",
        )
    )


def test_a_cache_list_equals_its_twin(
    hooked: dict[str, Mixers], note_rounds: Callable[[int], None]
) -> None:
    kinds = st.builds(
        lambda kv, ring: ListKind((kv, ArraysKind(hooked["lfm2"]), ring)),
        st.sampled_from([4, 256]).map(KVKind),
        SMALL_RINGS,
    )
    note_rounds(run(kinds, widths=FEWER, rarely=True))


def test_a_quantized_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(quantized_kinds, share=0.2, rarely=True))


def test_a_concatenated_cache_equals_its_twin(
    note_rounds: Callable[[int], None],
) -> None:
    note_rounds(run(st.builds(ConcatenateKind), share=0.2, rarely=True))


def test_a_chunked_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(chunked_kinds, share=0.2))


def test_a_compressing_layer_equals_its_twin(
    compressing: st.SearchStrategy[Kind], note_rounds: Callable[[int], None]
) -> None:
    note_rounds(run(compressing, share=0.2, rarely=True))


def test_any_caches_that_move_together_equal_their_twins(
    compressing: st.SearchStrategy[Kind],
    hooked: dict[str, Mixers],
    note_rounds: Callable[[int], None],
) -> None:
    kinds = compositions(
        [
            st.sampled_from([4, 256]).map(KVKind),
            SMALL_RINGS,
            st.just(ArraysKind(hooked["lfm2"])),
            quantized_kinds,
            st.builds(ConcatenateKind),
            chunked_kinds,
            compressing,
        ]
    )
    note_rounds(run(kinds, widths=FEWER, share=0.2, steps=25, rarely=True))
