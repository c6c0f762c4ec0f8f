"""DFlash2: convolutions, the selector, and refusals."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine import DFlash2Draft
from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.dflash2.config import read_settings
from mlx_speculation.models.dflash2.head import BlockConvolution
from mlx_speculation.models.dflash2.load import load_dflash2
from support.drafters.block_drafts import drafted
from support.identity import prompt_of
from support.models.block_checkpoints import (
    BLOCK,
    PACKAGINGS,
    write_block,
)
from support.models.dflash_checkpoints import VOCAB
from support.models.tiny_models import build

LAYERS = (0, 1, 3)
DRAFTS = BLOCK - 1


def test_a_block_of_one_row_has_no_rows_before_it() -> None:
    layer = BlockConvolution(8, 2, 4)
    layer.base_kernel = mx.ones((2, 2, 8))
    y = mx.ones((1, 1, 8))
    assert mx.array_equal(layer.sides(y * 0)[0](y), y)


def test_ids_that_the_target_lacks_are_no_candidates(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "dflash2", LAYERS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = 40
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made: Any = DFlash2Draft.from_folder(folder, build("llama", layers=4)).dflash
    for _, ids in drafted(made, prompt_of(20), DRAFTS).seen:
        assert ids is not None
        assert int(ids.max()) < 40


def test_its_anchor_is_always_given(tmp_path: Path) -> None:
    folder, model = write_block(tmp_path, "dflash2", LAYERS), build("llama", layers=4)
    DFlash2Draft.from_folder(folder, model, anchor="given")
    with pytest.raises(InvalidRequestError, match="anchor is 'samples'"):
        DFlash2Draft.from_folder(folder, model, anchor="samples")


def test_its_own_cap_is_not_put_on_the_targets(tmp_path: Path) -> None:
    gemma = build("gemma4_text")
    layers = tuple(range(min(3, len(gemma.layers))))
    folder = write_block(tmp_path, "dflash2, scaled", layers)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelFolderError, match="it is not known if both apply"):
        load_dflash2(folder, gemma)
    target: Any = gemma
    cap = getattr(target, "args", None) or target.language_model.args
    config["dflash_config"] |= {
        "output_multiplier": 1.0,
        "final_logit_softcapping": cap.final_logit_softcapping,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    head: Any = load_dflash2(folder, gemma).head
    assert head.selection.softcap is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"conv_group_size": 24}, "conv_group_size 24 .* not divide hidden_size 64"),
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
    with pytest.raises(ModelFolderError, match="has 255 ids, but the target has 256"):
        load_dflash2(folder, build("llama", layers=4))
