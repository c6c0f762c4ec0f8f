"""DFlash2: convolutions, the selector, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine import DFlash2Draft, DFlashDraft
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.dflash2.config import read_settings
from mlx_speculation.models.dflash2.convolution import BlockConvolution
from mlx_speculation.models.dflash2.load import load_dflash2
from support.drafters.block_drafts import context_of, drafted
from support.drafters.block_oracle import load_block
from support.identity import prompt_of
from support.models.block_checkpoints import (
    BLOCK,
    PACKAGINGS,
    TOP,
    parts_of,
    write_block,
)
from support.models.dflash_checkpoints import DIM, VOCAB, tensors_of, write_dflash
from support.models.tiny_models import build

LAYERS = (0, 1, 3)
DRAFTS = BLOCK - 1


def drafter(name: str = "dflash2") -> Any:
    """Return a drafter on its target."""
    return load_block(name, build("llama", layers=4), LAYERS).dflash


def test_a_convolution_is_the_sum_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    dim, taps, group, rows = 12, 3, 4, 5
    layer = BlockConvolution(dim, taps, group)
    layer.base_kernel = mx.array(rng.standard_normal((2, taps, dim)))
    wide = 2 * taps * dim // group
    layer.kernel_projection.weight = mx.array(rng.standard_normal((wide, dim)))
    a, y = (mx.array(rng.standard_normal((2, rows, dim))) for _ in range(2))
    weight = np.array(layer.kernel_projection.weight, np.float64)
    base = np.array(layer.base_kernel, np.float64)
    delta = (np.array(a, np.float64) @ weight.T).reshape(2, rows, 2, taps, -1)
    for index, side in enumerate(layer.sides(a)):
        expected = np.zeros((2, rows, dim))
        for batch in range(2):
            for i in range(rows):
                for t in range(min(taps, i + 1)):
                    for c in range(dim):
                        kernel = (
                            base[index, t, c] + delta[batch, i, index, t, c // group]
                        )
                        expected[batch, i, c] += kernel * float(y[batch, i - t, c])
        np.testing.assert_allclose(np.array(side(y)), expected, rtol=1e-4, atol=1e-4)


def test_a_block_of_one_row_has_no_rows_before_it() -> None:
    layer = BlockConvolution(8, 2, 4)
    layer.base_kernel = mx.ones((2, 2, 8))
    y = mx.ones((1, 1, 8))
    assert mx.array_equal(layer.sides(y * 0)[0](y), y)


def test_without_its_parts_it_is_dflash(tmp_path: Path) -> None:
    """Kernels that pass a row on, and codebooks of nothing."""
    model, tokens = build("llama", layers=4), prompt_of(20)
    plain = tensors_of("full", 3)
    kernel = mx.stack([mx.ones((2, DIM)), mx.zeros((2, DIM))], axis=1)
    changed = dict(plain)
    for name, value in parts_of(PACKAGINGS["dflash2"], 3).items():
        if name.endswith("base_kernel"):
            changed[name] = kernel
        elif name not in plain:
            changed[name] = mx.zeros_like(value)
    folder = write_block(tmp_path / "2", "dflash2", LAYERS, **changed)
    two: Any = DFlash2Draft.from_folder(folder, model).dflash
    other = write_dflash(tmp_path / "1", "full", LAYERS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["DFlashDraftModel"]
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    one: Any = DFlashDraft.from_folder(other, model).dflash
    found, expected = drafted(two, tokens, DRAFTS), drafted(one, tokens, DRAFTS)
    assert found.tokens == expected.tokens
    for (logits, ids), (whole, _) in zip(found.seen, expected.seen, strict=True):
        assert ids is not None
        assert mx.allclose(logits[0], whole[0, ids], atol=1e-4)


def test_context_is_not_convolved() -> None:
    """Keys and values of a context row do not depend on the rows before it."""
    made = drafter()
    context = context_of(made, prompt_of(9))
    other = mx.concatenate([context[:, :3] + 1, context[:, 3:]], axis=1)
    held = []
    for rows in (context, other):
        caches = made.head.new_caches()
        made.history(rows, mx.zeros((1, 8)), caches)
        held.append(caches[0].keys_and_values())
    for a, b in zip(*held, strict=True):
        assert mx.allclose(a[:, :, 3:], b[:, :, 3:])
        assert not mx.allclose(a[:, :, :3], b[:, :, :3])


def test_each_draft_is_the_best_of_its_candidates_behind_the_one_before() -> None:
    """A loop over the definition of the scores."""
    made, tokens = drafter(), prompt_of(20)
    selector = made.head.candidate_selector
    found = drafted(made, tokens, DRAFTS)
    context, newest = context_of(made, tokens), mx.array([tokens[-1:]])
    states = made.rows(context, newest, made.head.new_caches(), DRAFTS)
    logits = np.array(made._logits(states)[0], np.float64)
    first, second = (
        np.array(selector[name], np.float64)
        for name in ("predecessor_codebook", "successor_codebook")
    )
    projection = np.array(selector.hidden_projection.weight, np.float64)
    before, changes = tokens[-1], 0
    for index in range(DRAFTS):
        best = np.argsort(logits[index])[-TOP:]
        mixed = first[before] * (projection @ np.array(states[0, index], np.float64))
        scores = logits[index][best] + second[best] @ mixed
        given, ids = found.seen[index]
        assert ids is not None
        assert {*np.array(ids).tolist()} == {*best.tolist()}
        order = np.argsort(best)
        same = np.argsort(np.array(ids))
        np.testing.assert_allclose(
            np.array(given[0])[same], scores[order], rtol=1e-3, atol=1e-3
        )
        changes += int(best[np.argmax(scores)] != np.argmax(logits[index]))
        before = int(best[np.argmax(scores)])
        assert found.tokens[index] == before
    assert changes


def test_scales_and_caps_come_before_the_selector() -> None:
    made, tokens = drafter("dflash2, scaled"), prompt_of(20)
    states = made.rows(
        context_of(made, tokens), mx.array([tokens[-1:]]), made.head.new_caches(), 2
    )
    raw = made._target.head(states)
    assert mx.allclose(made._logits(states), 20 * mx.tanh(raw * 0.5 / 20), atol=1e-4)
    block = mx.array([[1, 2]])
    rows = made._target.embed(block, scaled=True)
    assert mx.allclose(made._embedded(block), 2 * rows)


def _no_successors(made: Any) -> None:
    selector = made.head.candidate_selector
    selector.successor_codebook = mx.zeros_like(selector.successor_codebook)


def _sides_of_their_own(made: Any) -> None:
    """What comes after attention and MLP has kernels of what comes before."""
    for layer in made.head.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel = conv.base_kernel[::-1]


def _groups_apart(made: Any) -> None:
    for layer in made.head.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            weight = conv.kernel_projection.weight
            by_group = weight.reshape(4, -1, weight.shape[1])[:, ::-1]
            conv.kernel_projection.weight = by_group.reshape(weight.shape)


def _anchor_samples(made: Any) -> None:
    made.head.settings = replace(made.head.settings, anchor="samples")


def _causal(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn._causal = True


def _narrow(made: Any) -> None:
    for layer in made.head.layers:
        layer.self_attn._window = 2


def _other_layers(made: Any) -> None:
    made.layers = (-1, 0, 2)


def _context_is_convolved(made: Any) -> None:
    """Each position of the context is mixed with the one before."""
    inner = made.rows

    def rows(context: Any, *rest: Any) -> Any:
        moved = mx.pad(context[:, :-1], [(0, 0), (1, 0), (0, 0)])
        return inner(context + moved, *rest)

    made.rows = rows


WRONG = [
    _no_successors,
    _sides_of_their_own,
    _groups_apart,
    _anchor_samples,
    _causal,
    _narrow,
    _other_layers,
    _context_is_convolved,
]


@pytest.mark.slow  # a control: references show which convention is right
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_convention_changes_the_drafts(change: Callable[[Any], None]) -> None:
    made, texts = drafter(), [prompt_of(9 + n)[n:] for n in range(12)]
    before = [drafted(made, text, DRAFTS).tokens for text in texts]
    assert before == [drafted(made, text, DRAFTS).tokens for text in texts]
    change(made)
    after = [drafted(made, text, DRAFTS).tokens for text in texts]
    pairs = [
        (one, other)
        for a, b in zip(before, after, strict=True)
        for one, other in zip(a, b, strict=True)
    ]
    assert sum(one == other for one, other in pairs) / len(pairs) < 0.9


def test_ids_that_the_target_lacks_are_no_candidates(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "dflash2", LAYERS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = 40
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made: Any = DFlash2Draft.from_folder(folder, build("llama", layers=4)).dflash
    for _, ids in drafted(made, prompt_of(20), DRAFTS).seen:
        assert ids is not None
        assert int(ids.max()) < 40


def test_its_own_cap_is_not_put_on_the_targets(tmp_path: Path) -> None:
    gemma = build("gemma4_text")
    layers = tuple(range(min(3, len(gemma.layers))))
    folder = write_block(tmp_path, "dflash2, scaled", layers)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelFolderError, match="whether those stand for it, or both"):
        load_dflash2(folder, gemma)
    own: Any = gemma
    cap = getattr(own, "args", None) or own.language_model.args
    config["dflash_config"] |= {
        "output_multiplier": 1.0,
        "final_logit_softcapping": cap.final_logit_softcapping,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    head: Any = load_dflash2(folder, gemma).head
    assert head.own.softcap is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"conv_group_size": 24}, "conv_group_size 24 and hidden_size 64"),
        ({"selector_rank": 0}, "selector_rank 0"),
        ({"sample_from_anchor": True}, "sample_from_anchor true"),
        ({"mask_token_id": None}, "mask_token_id None"),
    ],
)
def test_a_config_that_is_not_known_is_refused(
    keys: dict[str, Any], message: str
) -> None:
    config = PACKAGINGS["dflash2"].config(LAYERS)
    config["dflash_config"] |= keys
    with pytest.raises(ModelFolderError, match=message):
        read_settings(config)


def test_a_selector_of_other_ids_is_refused(tmp_path: Path) -> None:
    books = {
        f"candidate_selector.{name}_codebook": mx.zeros((VOCAB - 1, 8))
        for name in ("predecessor", "successor")
    }
    folder = write_block(tmp_path, "dflash2", LAYERS, **books)
    with pytest.raises(ModelFolderError, match="knows 255 ids, and the target has 256"):
        load_dflash2(folder, build("llama", layers=4))
