"""DSpark on its target: the Markov head, what rows see, confidence, Gemma's layers.

Every convention that no tensor shows is turned here, and the drafts are others then.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine import DSparkDraft
from support.drafters.block_drafts import Greedy, context_of, drafted
from support.drafters.block_oracle import load_block
from support.identity import prompt_of
from support.models.block_checkpoints import BLOCK, RANK, write_block
from support.models.dflash_checkpoints import DIM, VOCAB
from support.models.tiny_models import build

LAYERS = (0, 1, 3)


def drafter(name: str = "deepspec") -> Any:
    """Return a drafter on its target."""
    return load_block(name, build("llama", layers=4), LAYERS).dflash


@pytest.mark.parametrize("name", ["lfm2", "nvidia"])
def test_drafts_follow_the_markov_head(name: str, tmp_path: Path) -> None:
    """Base logits of nothing, and a head that permutes: it is applied again and again.

    With a given anchor the first draft is one row later, and the anchor is before it.
    """
    order = np.random.default_rng(0).permutation(VOCAB)
    changed = {
        "norm.weight": mx.zeros(DIM),
        "markov_head.markov_w1.weight": mx.eye(VOCAB),
        "markov_head.markov_w2.weight": mx.eye(VOCAB)[mx.array(np.argsort(order))],
    }
    folder = write_block(tmp_path, name, LAYERS, **changed)
    made = DSparkDraft.from_folder(folder, build("llama", layers=4)).dflash
    tokens = prompt_of(12)
    expected, count = [tokens[-1]], made.head.depth
    for _ in range(count):
        expected.append(int(order[expected[-1]]))
    assert drafted(made, tokens, count).tokens == expected[1:]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_block_see_each_other(causal: bool) -> None:
    made, tokens = drafter(), prompt_of(12)
    for layer in made.head.layers:
        layer.self_attn._causal = causal
    context, newest = context_of(made, tokens), mx.array([tokens[-1:]])
    rows = made.rows(context, newest, made.head.new_caches(), 1)
    weight = made.head.embed_tokens.weight
    weight[VOCAB - 1] = -weight[VOCAB - 1]
    other = made.rows(context, newest, made.head.new_caches(), 1)
    assert bool(mx.allclose(rows, other, atol=1e-5)) == causal


def test_the_last_position_of_the_context_counts() -> None:
    made, tokens = drafter(), prompt_of(12)
    context, newest = context_of(made, tokens), mx.array([tokens[-1:]])
    rows = made.rows(context, newest, made.head.new_caches(), BLOCK)
    moved = mx.concatenate([context[:, :-1], -context[:, -1:]], axis=1)
    other = made.rows(moved, newest, made.head.new_caches(), BLOCK)
    assert not mx.allclose(rows, other, atol=1e-3)


def _mean(made: Any, change: Callable[[Any], None]) -> float:
    """Return how many drafts stay the same if something is changed."""
    texts = [prompt_of(9 + n)[n:] for n in range(12)]
    before = [drafted(made, text, made.head.depth).tokens for text in texts]
    change(made)
    after = [drafted(made, text, made.head.depth).tokens for text in texts]
    pairs = [
        (a, b)
        for one, two in zip(before, after, strict=True)
        for a, b in zip(one, two, strict=False)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def _other_anchor(made: Any) -> None:
    settings = made.head.settings
    other = "given" if settings.anchor == "samples" else "samples"
    made.head.settings = replace(settings, anchor=other)


def _other_layers(made: Any) -> None:
    made.layers = (-1, 0, 2)


def _other_causality(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn._causal = not layer.self_attn._causal


def _other_window(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn._window = 2


def _other_pairs(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn.rope.traditional ^= True


def _other_rotation(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn.rope.dims = 4


def _no_one_more(made: Any) -> None:
    for layer in made.head.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[name].weight = layer[name].weight - 1


def _no_markov(made: Any) -> None:
    head = made.head.markov_head
    head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)


def _no_gates(made: Any) -> None:
    for layer in made.head.layers:
        attention = layer.self_attn
        wide = attention.q_proj.weight
        by_head = wide.reshape(attention.n_heads, 2, -1, DIM)
        attention.q_proj.weight = by_head[:, 0].reshape(-1, DIM)
        attention._gated = False


def _no_sinks(made: Any) -> None:
    for layer in made.head.layers:
        del layer.self_attn["attention_sink_bias"]


def _no_levels(made: Any) -> None:
    made.head.own = replace(made.head.own, log_snr=None)


def _context_through_the_norm(made: Any) -> None:
    for layer in made.head.layers:
        attention, norm = layer.self_attn, layer.input_layernorm
        inner = attention.attend

        def attend(
            x: Any, context: Any, cache: Any, f: Any = inner, n: Any = norm
        ) -> Any:
            return f(x, n(context), cache)

        object.__setattr__(attention, "attend", attend)


def _context_with_the_anchor(made: Any) -> None:
    """The context is one position longer, as if the anchor's state were known."""
    inner = made.rows

    def rows(context: Any, *rest: Any) -> Any:
        return inner(mx.concatenate([context, context[:, -1:]], axis=1), *rest)

    made.rows = rows


WRONG = {
    "anchor": ("deepspec", _other_anchor),
    "anchor, given": ("nvidia", _other_anchor),
    "layers": ("deepspec", _other_layers),
    "causality": ("deepspec", _other_causality),
    "causality, nvidia": ("nvidia", _other_causality),
    "window": ("nvidia", _other_window),
    "pairs": ("deepspec", _other_pairs),
    "pairs, lfm2": ("lfm2", _other_pairs),
    "partial rotation": ("deepspec", _other_rotation),
    "rotation of qwen3.5": ("qwen3.5", _other_rotation),
    "norms less one": ("qwen3.5", _no_one_more),
    "gates": ("qwen3.5", _no_gates),
    "sinks": ("nvidia", _no_sinks),
    "levels": ("prism", _no_levels),
    "markov": ("deepspec", _no_markov),
    "norm of the context": ("deepspec", _context_through_the_norm),
    "context with the anchor": ("deepspec", _context_with_the_anchor),
}


@pytest.mark.slow  # a control: references show which convention is right
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_convention_changes_the_drafts(name: str) -> None:
    packaging, change = WRONG[name]
    made = drafter(packaging)
    assert _mean(made, lambda made: None) == 1.0
    assert _mean(made, change) < 0.9


def test_confidence_is_that_of_its_definition() -> None:
    """It knows the token before a draft, and not the draft."""
    made, tokens = drafter(), prompt_of(12)
    made.confident = True
    choose, newest = Greedy(), mx.array([tokens[-1:]])
    context = context_of(made, tokens)
    found = made.draft(context, newest, made.head.new_caches(), BLOCK, choose)
    states = made.rows(context, newest, made.head.new_caches(), BLOCK)
    projection = made.head.confidence_head.proj
    table = made.head.markov_head.markov_w1.weight
    before = [tokens[-1], *choose.tokens[:-1]]
    for index in range(BLOCK):
        read = mx.concatenate([states[0, index], table[before[index]]])
        logit = (projection.weight[0] * read).sum() + projection.bias[0]
        assert mx.allclose(found[index], mx.sigmoid(logit), atol=1e-5)
    assert read.shape == (DIM + RANK,)
    made.head.own = replace(made.head.own, temperatures=(0.5,) * BLOCK)
    choose = Greedy()
    warmer = made.draft(context, newest, made.head.new_caches(), BLOCK, choose)
    odds = mx.log(found / (1 - found)) / 0.5
    assert mx.allclose(warmer, mx.sigmoid(odds), atol=1e-4)


def test_nothing_is_computed_for_a_confidence_that_is_not_asked_for() -> None:
    made, tokens = drafter(), prompt_of(12)
    context, newest = context_of(made, tokens), mx.array([tokens[-1:]])
    caches = made.head.new_caches()
    assert made.draft(context, newest, caches, BLOCK, Greedy()) is None


def test_gemmas_cap_is_not_on_the_bias() -> None:
    made, tokens = drafter("deepspec, gemma"), prompt_of(12)
    made.head.lm_head.weight = made.head.lm_head.weight * 100
    largest: Any = max(
        abs(float(x)) for logits, _ in drafted(made, tokens, 1).seen for x in logits[0]
    )
    base = made._logits(
        made.rows(
            context_of(made, tokens), mx.array([tokens[-1:]]), made.head.new_caches(), 1
        )
    )
    assert float(mx.abs(base).max()) <= 30
    assert float(mx.abs(base).max()) > 29
    head = made.head.markov_head
    head.markov_w2.weight = head.markov_w2.weight * 100
    largest = float(mx.abs(drafted(made, tokens, 1).seen[0][0]).max())
    assert largest > 60


def test_gemmas_embeddings_are_scaled() -> None:
    made = drafter("deepspec, gemma")
    block = mx.array([[3, VOCAB - 1]])
    expected = made.head.embed_tokens.weight[block] * DIM**0.5
    assert mx.allclose(made._embedded(block), expected, rtol=1e-5)


def test_levels_are_added_once_to_each_row() -> None:
    """Of the most for the anchor, of the least for masks."""
    made = drafter("prism")
    block = mx.array([[3, VOCAB - 1, VOCAB - 1]])
    plain = made._target.embed(block, scaled=True)
    added = made._embedded(block) - plain
    waves = 10000.0 ** (-np.arange(64) / 64)
    fc1, fc2 = made.head.log_snr.log_snr_fc1, made.head.log_snr.log_snr_fc2
    for row, time in enumerate((1000.0, 0.0, 0.0)):
        features = np.concatenate([np.sin(time * waves), np.cos(time * waves)])
        inner = np.array(fc1.weight, np.float64) @ features + np.array(fc1.bias)
        inner = inner / (1 + np.exp(-inner))
        expected = np.array(fc2.weight, np.float64) @ inner + np.array(fc2.bias)
        np.testing.assert_allclose(np.array(added[0, row]), expected, atol=2e-3)
