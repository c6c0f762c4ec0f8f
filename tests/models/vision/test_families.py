"""Every family of mlx-vlm that reads images is in one table, SERVED or REFUSED."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models.vision import ImageForward, ImagePrompt, VisionTarget
from mlx_speculation.models.vision.families import (
    REFUSED,
    SERVED,
    Family,
    check_family,
    family_of,
)
from support.models.tiny_vision import FAMILIES, WITHOUT_MLX_VLM, build, tiny
from support.models.vision_families import REFUSED as TINY_REFUSED


@cache
def packages() -> dict[str, str]:
    spec = importlib.util.find_spec("mlx_vlm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "models"
    return {
        one.parent.name: "".join(
            file.read_text("utf-8") for file in sorted(one.parent.glob("*.py"))
        )
        for one in folder.glob("*/__init__.py")
    }


@WITHOUT_MLX_VLM
def test_every_family_with_a_vision_part_stands_in_one_table() -> None:
    sources = packages()
    seeing = {
        name
        for name, source in sources.items()
        if "def get_input_embeddings" in source and "vision_config" in source
    }
    named = {*SERVED, *REFUSED}
    assert not SERVED.keys() & REFUSED.keys()
    new, gone = sorted(seeing - named), sorted(named - sources.keys())
    assert not new, (
        f"mlx-vlm has families that read images and stand in no table: {new}. Build "
        "a tiny model of each in tests/support/models/vision_families and compare its "
        "texts with mlx-vlm's, or refuse it with a reason in "
        "models/vision/families.toml."
    )
    assert not gone, f"mlx-vlm no longer has {gone}: take them out of families.toml."


def test_every_family_that_is_served_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vision.md").read_text("utf-8")
    words = set(re.findall(r"[a-z0-9_]+", page))
    assert SERVED.keys() <= words, sorted(SERVED.keys() - words)


def test_every_family_that_is_served_is_built_and_compared() -> None:
    assert FAMILIES.keys() == SERVED.keys()


@WITHOUT_MLX_VLM
@pytest.mark.parametrize("name", SERVED)
def test_positions_are_passed_where_the_model_would_keep_them(name: str) -> None:
    sources = packages()[name]
    kept = re.search(r"\._(rope_deltas|position_ids)\b", sources) is not None
    assert SERVED[name].mrope == kept


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mllama", "cross-attention"),
        ("florence2", "encoder-decoder"),
        ("phi4mm", "audio"),
        ("gemma3n", "place a row by the number of rows fed at once"),
        ("nothing", "no vision model of that name"),
    ],
)
def test_other_families_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        check_family(name)


def test_a_text_model_is_no_vision_model() -> None:
    with pytest.raises(UnsupportedModelError, match="no model of mlx-vlm"):
        VisionTarget(nn.Linear(2, 2))


@WITHOUT_MLX_VLM
def test_tokens_that_see_later_ones_are_refused() -> None:
    vlm: Any = tiny("gemma4").vlm
    vlm.config.text_config.use_bidirectional_attention = "all"
    with pytest.raises(UnsupportedModelError, match="see later ones"):
        family_of(vlm)
    vlm.config = SimpleNamespace(text_config=None)
    assert family_of(vlm).name == "gemma4"


@WITHOUT_MLX_VLM
def test_rows_of_gemma3n_are_not_steps() -> None:
    """gemma3n is refused: its logits of several rows are not those of single steps."""
    vlm = build("gemma3n", TINY_REFUSED["gemma3n"])
    caches = [vlm.language_model.make_cache() for _ in range(2)]
    ids = mx.array([[7 * i for i in range(20)]])
    rows, steps = ids[:, :4], [ids[:, i : i + 1] for i in range(4)]
    at_once = vlm.language_model(rows, cache=caches[0]).logits
    alone = [vlm.language_model(row, cache=caches[1]).logits for row in steps]
    apart = mx.abs(at_once - mx.concatenate(alone, axis=1)).max(axis=-1)
    assert mx.all(apart[0, 1:] > 0.01).item()


@WITHOUT_MLX_VLM
def test_hunyuan_reads_positions_from_the_model() -> None:
    """hunyuan_vl is refused: it uses kept positions, perhaps of another request."""
    vlm = build("hunyuan_vl", TINY_REFUSED["hunyuan_vl"])
    positions = mx.broadcast_to(mx.arange(6), (1, 4, 6))
    ids = mx.arange(6)[None]

    def logits(passed: mx.array, kept: mx.array | None) -> mx.array:
        vlm.language_model._position_ids = kept
        caches = [KVCache() for _ in vlm.layers]
        result: mx.array = vlm.language_model(
            ids, cache=caches, position_ids=passed
        ).logits
        return result

    other = 5 - positions
    assert not mx.allclose(logits(positions, None), logits(other, None)).item()
    assert mx.array_equal(logits(positions, other), logits(other, None)).item()


def test_one_image_is_one_where_mlx_vlm_reads_no_more() -> None:
    family = Family("got", one_image=True)
    target: Any = SimpleNamespace(family=family, placeholder=9, one_pass=False)
    one = mx.zeros((1, 3))
    for pixels in (one, [mx.zeros((5, 3)), one]):
        prompt = ImagePrompt(mx.array([[1, 9, 2]]), {"pixel_values": pixels})
        assert ImageForward(target, prompt).slots == [(1, 2)]
    prompt = ImagePrompt(mx.array([[1, 9, 9, 2]]), {"pixel_values": mx.zeros((2, 3))})
    with pytest.raises(InvalidRequestError, match=r"2 images, but .* reads only one"):
        ImageForward(target, prompt)
