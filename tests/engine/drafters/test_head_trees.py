"""Trees of EAGLE-3 heads: their growth, the head's inputs, and the unchanged text."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import SpeculativeGenerator, demo_models, load
from mlx_speculation.caches.types.tree_view import TreeView
from mlx_speculation.engine import CascadeDraft, EagleDraft, LookupDraft
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import HiddenStates, TreeHooks
from mlx_speculation.models.checkpoints import HeadOutput
from mlx_speculation.models.mtp import MtpCache
from mlx_speculation.models.mtp.tree_growth import BEAM, CHILDREN, Level, grow
from support.covering import covering
from support.drafters.drafted_targets import PROMPT, DraftedTargets, sampling
from support.drafters.tree_drafter import path_to
from support.models.eagle_checkpoints import DIALECTS, write_eagle
from support.references.mtp_oracles import VOCAB, OracleMtp

TOKENS, NODES, LEVELS = 16, 14, 3
TARGETS = ("llama", "gemma3_text", "llama(sliding)")
LAYERS = {"llama(sliding)": (0, 1), "gemma3_text": (0, 1, 2)}
# Heads that draft trees and read a target of four layers.
HEADS = sorted({*DIALECTS} - {"authors", "several layers"})
CASES = [
    *((name, "specforge") for name in TARGETS),
    *(("llama", dialect) for dialect in HEADS if dialect != "specforge"),
]
# Few heads are enough: a test below compares the tree levels of every head with chains.
QUICK = [*CASES[: len(TARGETS)], ("llama", "whole")]
TARGETED = DraftedTargets(TOKENS, {"llama": 4})


@cache
def draft_of(dialect: str, name: str) -> EagleDraft:
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), dialect, LAYERS.get(name, (0, 1, 3)))
        return EagleDraft.from_folder(written, TARGETED.target(name))


def with_tree(name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
    options = {"draft_length": LEVELS, "draft_tree": NODES, **options}
    made: SpeculativeGenerator = TARGETED.generator(name, draft, **options)
    return made


@pytest.mark.parametrize(
    ("case", "temperature"),
    covering(CASES, (0.0, 0.8), quick=(0, QUICK)),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_trees_of_a_head_leave_the_text_as_it_is(
    case: tuple[str, str], temperature: float
) -> None:
    name, dialect = case
    text = TARGETED.text(name, temperature)
    result = with_tree(name, draft_of(dialect, name)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.sources["eagle"].drafts >= TOKENS // 3


class TreeOracle(OracleMtp):
    """A head with two likely tokens after each token; one of the two is the text's.

    The position decides which of the two is likelier. Nodes that leave the text get
    other states, see `state_of`. The inputs of nodes are checked.
    """

    def __init__(self, draft: EagleDraft, text: list[int], **options: Any) -> None:
        super().__init__(draft.model, text, **options)
        self.layers, self.states = draft.eagle.layers, draft.eagle.states
        taps = HiddenStates(draft.model, layers=self.layers)
        with taps.collect() as states:
            draft.model(mx.array([text]))
        self._states = self.states(states)
        self.head.ids = None  # type: ignore[attr-defined]
        self.levels = 0

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Any, layer: int = 0
    ) -> HeadOutput:
        """Run slots, or the nodes of a tree level, which all have the same slot."""
        (view,) = caches
        if not isinstance(view, TreeView):
            return super().rows(hidden, tokens, caches, layer)
        self.levels += 1
        slot, count = view.offset, tokens.shape[1]
        mask = view.make_mask(count, return_array=True)
        row = tokens[:, None, :, None].astype(mx.float32)
        keys, _ = view.update_and_fetch(row, row)
        ids: Any = keys[0, 0, :, 0].tolist()
        follows = []
        for node in range(count):
            sees: Any = mask[node].tolist()
            seen = [token for token, see in zip(ids, sees, strict=True) if see]
            assert len(seen) == slot + 1  # a token for each slot so far
            follows.append(seen == self._text[1 : slot + 2])
            was = seen[:-1] == self._text[1 : slot + 1]
            assert hidden[0, node, 0].item() == state_of(slot - 1, was)
        return self._say(slot, follows)

    def _said(self, slots: range, layer: int) -> HeadOutput:
        return self._say(slots[-1], [True] * len(slots))

    def _say(self, slot: int, follows: list[bool]) -> HeadOutput:
        states = mx.array([state_of(slot, each) for each in follows])
        recycled = mx.broadcast_to(states[None, :, None], (1, len(follows), 64))
        right = self._guess(slot + 2)
        first = random.Random(slot).randrange(2)
        logits = mx.full((len(follows), VOCAB), -100.0)
        logits[:, right] = 100.0 - 0.1 * first
        logits[:, (right + 7) % VOCAB] = 99.9 + 0.1 * first
        return HeadOutput(recycled, logits[None])


def state_of(slot: int, follows: bool) -> float:
    """Return the number that a slot's state holds; see `OracleMtp`."""
    return 1000.0 + 4 * slot + (0 if follows else 2)


def oracle(name: str, text: list[int], **options: Any) -> tuple[EagleDraft, TreeOracle]:
    known = draft_of("specforge", name)
    draft = EagleDraft(known.model, known.eagle.head, known.eagle.layers)
    knowing = TreeOracle(draft, text, **options)
    draft.eagle = knowing  # type: ignore[assignment]
    return draft, knowing


@pytest.mark.parametrize(("name", "temperature"), covering(TARGETS, (0.0, 0.8)))
def test_a_text_on_any_branch_is_accepted_to_its_end(
    name: str, temperature: float
) -> None:
    text = TARGETED.text(name, temperature)
    draft, knowing = oracle(name, text)
    stats = {}
    for tree in (NODES, None):
        result = with_tree(name, draft, draft_tree=tree).generate(
            text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
        )
        assert result.tokens == text[PROMPT : PROMPT + TOKENS]
        assert not result.stats.drafter_faults
        stats[tree] = result.stats
    assert stats[NODES].acceptance_rate == 1.0
    assert stats[None].acceptance_rate < 1.0 or temperature
    assert knowing.levels


def test_after_a_wrong_tree_a_text_is_accepted_again() -> None:
    text = TARGETED.text("gemma3_text", 0.0)
    draft, _ = oracle("gemma3_text", text, wrong=lambda position: position % 4 == 0)
    result = with_tree("gemma3_text", draft).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(0.0)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.rounds <= TOKENS // 4 + 2


@pytest.mark.parametrize("dialect", HEADS)
def test_a_level_is_what_chains_to_its_nodes_are(dialect: str) -> None:
    draft, text = draft_of(dialect, "llama"), TARGETED.text("llama", 0.0)[:PROMPT]
    hooks = TreeHooks(draft.head)
    with draft.taps.collect() as states:
        draft.model(mx.array([text]))
    hidden = draft.eagle.states(states)[:, :-1]

    def cache_after(positions: int) -> MtpCache:
        made = MtpCache(draft.eagle)
        made.feed(hidden[:, :positions], positions, text)
        return made

    newest = len(text) - 1
    tree_cache = cache_after(newest - 2)
    opened = tree_cache.draft_tree(hidden[:, newest - 2 :], newest, text)
    # Two nodes at each level. A parent is an index into the level before.
    levels: list[tuple[list[int], list[int]]] = [
        ([5, 9], [0, 0]),
        ([7, 8], [1, 1]),
        ([3, 4], [1, 0]),
    ]
    parents, level_logits = [-1, -1, 1, 1, 3, 2], [opened.logits]
    for number, (tokens, above) in enumerate(levels):
        nodes = range(2 * number, 2 * number + 2)
        seen = [
            [column in path_to(parents, node) for column in range(2 * number + 2)]
            for node in nodes
        ]
        opened.run(mx.array([tokens]), mx.array(above), mx.array(seen))
        level_logits.append(opened.logits)
    tree_cache.commit()
    assert tree_cache.end == newest
    flat = [token for tokens, _ in levels for token in tokens]
    for node in range(6):
        path, chain = [flat[each] for each in path_to(parents, node)], []

        def choose(logits: mx.array, ids: Any = None, path: Any = path) -> mx.array:
            chain.append(logits[0])  # noqa: B023
            return mx.array([[*path, 0][len(chain) - 1]])  # noqa: B023

        again = cache_after(newest - 2)
        count = len(path) + 1
        again.draft(hidden[:, newest - 2 :], newest, text, choose, count)
        assert mx.allclose(level_logits[0][0], chain[0], atol=1e-4).item()
        of_node = level_logits[len(path)][node % 2]
        assert mx.allclose(of_node, chain[-1], atol=1e-4).item()
    hooks.remove()


@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 40), levels=st.integers(1, 5))
def test_a_tree_has_the_likeliest_of_what_was_looked_at(
    seed: int, nodes: int, levels: int
) -> None:
    def likely(path: tuple[int, ...]) -> list[tuple[float, int]]:
        draw = random.Random(f"{seed} {path}")
        weights = [draw.random() ** 4 + 1e-3 for _ in range(60)]
        pairs = [(w / sum(weights), token) for token, w in enumerate(weights)]
        return sorted(pairs, reverse=True)

    run: list[tuple[int, ...]] = [()]

    def children(count: int) -> tuple[mx.array, mx.array]:
        best = [likely(path)[:count] for path in run]
        tokens = mx.array([[t for _, t in each] for each in best], mx.uint32)
        return tokens, mx.log(mx.array([[p for p, _ in each] for each in best]))

    columns: list[tuple[int, ...]] = []

    def run_level(level: Level) -> None:
        above: Any = level.above.tolist()
        tokens: Any = level.tokens[0].tolist()
        run[:] = [(*run[a], t) for a, t in zip(above, tokens, strict=True)]
        columns.extend(run)
        sights: Any = level.seen.tolist()
        for path, seen in zip(run, sights, strict=True):
            seen_paths = [
                column for column, see in zip(columns, seen, strict=True) if see
            ]
            assert seen_paths == [path[: i + 1] for i in range(len(path))]

    grown, above = grow(children, run_level, nodes, levels)
    tokens: Any = grown.tolist()
    parents: Any = above.tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    made = [
        tuple(tokens[i] for i in path_to(parents, node)) for node in range(len(tokens))
    ]
    # The reference: a beam of paths.
    beam: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    every: list[tuple[float, tuple[int, ...]]] = []
    for level in range(levels):
        width = (nodes if levels == 1 else min(BEAM, nodes)) if not level else CHILDREN
        here = [
            (value * p, (*path, token))
            for value, path in beam
            for p, token in likely(path)[:width]
        ]
        every += here
        beam = sorted(here, reverse=True)[: min(BEAM, nodes)]
    assert set(made) == {path for _, path in sorted(every, reverse=True)[:nodes]}
    chain = [
        path
        for path in made
        if all(token == likely(path[:i])[0][1] for i, token in enumerate(path))
    ]
    assert made[: len(chain)] == sorted(chain, key=len)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_begins_with_what_a_chain_would_be(temperature: float) -> None:
    text, draft = TARGETED.text("llama", temperature), draft_of("specforge", "llama")
    generator = with_tree("llama", draft, draft_tree=64)
    stream = generator.stream(
        text[:PROMPT], max_tokens=99, sampling=sampling(temperature), stop_tokens=()
    )
    together = 0
    for _ in range(6):
        stream.next_round()
        request, guard = stream.request, cast(Any, stream.request.drafter)
        proposals = []
        for tree in (64, 0):
            choose = CheckedChoose(request.verifier, None, tree)
            proposals.append(guard.inner.propose(request.sequence, LEVELS, choose))
            guard.inner.discard()
        parents: Any = proposals[0].branches.parents.tolist()
        first = next(i for i, parent in enumerate([*parents, 9]) if parent != i - 1)
        assert (
            proposals[0].tokens[:first].tolist() == proposals[1].tokens[:first].tolist()
        )
        together += first
    assert together > 12


@pytest.mark.slow
def test_the_bundled_head_drafts_better_with_trees() -> None:
    folders = demo_models()
    model, tokenizer = load(folders["dense"])
    draft = EagleDraft.from_folder(folders["eagle"], model, layer_ids="layers")
    length = {}
    for tree in (16, None):
        generator = SpeculativeGenerator(
            model, tokenizer, draft=draft, draft_length=4, draft_tree=tree
        )
        result = generator.generate("def area(width, height):\n", max_tokens=48)
        length[tree] = result.stats.mean_accepted_length
    assert length[16] > length[None]


def test_in_a_cascade_the_lookup_drafts_chains() -> None:
    text = TARGETED.text("llama", 0.0)
    draft = CascadeDraft(LookupDraft(), draft_of("specforge", "llama"))
    again = text[:PROMPT] + text[PROMPT - 20 : PROMPT]
    plain = TARGETED.generator("llama", None).generate(again, max_tokens=TOKENS)
    result = with_tree("llama", draft).generate(again, max_tokens=TOKENS)
    assert result.tokens == plain.tokens
    assert {"lookup", "eagle"} <= result.stats.sources.keys()


def test_a_head_with_a_window_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="which drafts no trees"):
        with_tree("llama", draft_of("several layers", "llama"))
