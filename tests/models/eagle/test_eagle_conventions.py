"""What no tensor of an EAGLE-3 or P-EAGLE head shows changes its drafts.

Two things do not: the scale of Gemma's embeddings, and of its layer. A norm follows.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.drafters.block_drafts import Greedy
from support.identity import prompt_of
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import build

DRAFTS = 4


def head_on(dialect: str, folder: Path) -> Any:
    """Return a random head on its target."""
    found, source = draft_folder(write_eagle(folder, dialect))
    return source.from_folder(found, build("llama", layers=4))  # type: ignore[attr-defined]


def drafted(draft: Any, tokens: list[int]) -> list[int]:
    """Return what a head drafts behind tokens."""
    with draft.taps.collect() as states:
        draft.model(mx.array([tokens[:-1]]))
    eagle, ids, choose = draft.eagle, draft.head.ids, Greedy()
    hidden, paired = eagle.states(states), mx.array([tokens[1:]])
    if draft.kind == "peagle":

        def choose_next(logits: mx.array, own: mx.array | None = None) -> mx.array:
            return choose(logits, ids)

        eagle.draft(hidden, paired, eagle.new_caches(), DRAFTS, choose_next)
        return choose.tokens
    (caches,) = eagle.head.new_caches()
    out = eagle.step(hidden, paired, caches)
    for _ in range(DRAFTS):
        token = choose(out.logits[:, -1], ids)
        out = eagle.step(out.recycled[:, -1:], token[None], caches)
    return choose.tokens


def _residual(draft: Any) -> None:
    layer = draft.head.midlayer
    layer._normed_residual = not layer._normed_residual


def _recycled(draft: Any) -> None:
    settings = draft.head._settings
    draft.head._settings = replace(settings, norm_output=not settings.norm_output)


def _layers(draft: Any) -> None:
    """The numbers count the embedding, and are taken for those of layers."""
    draft.taps.remove()
    draft.__init__(draft.model, draft.head, (-1, 0, 2))


def _no_query_norms(draft: Any) -> None:
    for layer in (draft.head.midlayer, *draft.head.later):
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight = mx.ones_like(norm.weight)


def _no_window(draft: Any) -> None:
    for layer in draft.head.later:
        layer._window = None
    draft.head._settings = replace(draft.head._settings, windows=(None, None))


def _other_mask(draft: Any) -> None:
    masks = draft.head._mask
    draft.head._mask = replace(masks, token=masks.token - 1)


def _raw_mask(draft: Any) -> None:
    """What masks hold does not go through the norms before `fc`."""
    inner = draft.head.masked

    def masked(batch: int, count: int) -> Any:
        states, tokens = inner(batch, count)
        state = draft.head.fc(draft.head.mask_hidden)
        return mx.broadcast_to(state, states.shape), tokens

    object.__setattr__(draft.head, "masked", masked)


WRONG: list[tuple[str, Callable[[Any], None]]] = [
    ("specforge", _residual),
    ("specforge", _recycled),
    ("specforge", _layers),
    ("speculators", _residual),
    ("norm_output", _recycled),
    ("deepspec", _no_query_norms),
    ("deepspec", _layers),
    ("deepspec", _residual),
    ("several layers", _no_window),
    ("peagle", _residual),
    ("peagle", _layers),
    ("peagle", _other_mask),
    ("aws", _raw_mask),
]


@pytest.mark.slow  # a control: references show which convention is right
@pytest.mark.parametrize(
    ("dialect", "change"), WRONG, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_wrong_convention_changes_the_drafts(
    dialect: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    draft = head_on(dialect, tmp_path)
    texts = [prompt_of(16 + n)[n // 2 :] for n in range(12)]
    before = [drafted(draft, text) for text in texts]
    assert before == [drafted(draft, text) for text in texts]
    change(draft)
    after = [drafted(draft, text) for text in texts]
    pairs = [
        (one, other)
        for a, b in zip(before, after, strict=True)
        for one, other in zip(a, b, strict=True)
    ]
    assert sum(one == other for one, other in pairs) / len(pairs) < 0.9
