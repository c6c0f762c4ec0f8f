"""Which families of mlx-vlm are served: each stands in one table, with a reason."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.models.vision.families import (
    REFUSED,
    SERVED,
    UNTRIED,
    check_family,
    family_of,
)
from support.models.tiny_vision import FAMILIES, WITHOUT_MLX_VLM, tiny


def packages() -> dict[str, str]:
    """Return the source of each package of mlx_vlm.models, by its name."""
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
    found = packages()
    seeing = {
        name
        for name, source in found.items()
        if "def get_input_embeddings" in source and "vision_config" in source
    }
    named = [*SERVED, *REFUSED, *UNTRIED]
    assert seeing <= set(named)
    assert set(named) <= found.keys()
    assert len(named) == len(set(named))


def test_every_family_that_is_served_is_built_and_compared() -> None:
    assert FAMILIES.keys() == SERVED.keys()


@WITHOUT_MLX_VLM
@pytest.mark.parametrize("name", SERVED)
def test_positions_are_passed_where_the_model_would_keep_them(name: str) -> None:
    sources = packages()[name]
    kept = re.search(r"self\._(rope_deltas|position_ids)\b", sources) is not None
    assert SERVED[name].mrope == kept


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mllama", "cross-attention"),
        ("florence2", "encoder-decoder"),
        ("phi4mm", "audio"),
        ("got", "has not been compared"),
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
