"""Reading DFlash folders: layers of the target, windows, and refusals."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.dflash import is_dflash, load_dflash
from mlx_speculation.models.dflash.config import layer_readings, read_settings
from mlx_speculation.models.eagle import is_eagle
from support.models.dflash_checkpoints import VARIANTS, config_of, write_dflash
from support.models.tiny_models import build


def with_own(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a config.json with changed keys in `dflash_config`; None removes a key."""
    block_config = config["dflash_config"] | keys
    left = {key: value for key, value in block_config.items() if value is not None}
    return {**config, "dflash_config": left}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_known_and_read(variant: str, tmp_path: Path) -> None:
    write_dflash(tmp_path, variant)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert is_dflash(config)
    assert not is_eagle(config)
    head, layers, _ = load_dflash(tmp_path, build("llama", layers=4))
    assert layers == (0, 1, 3)
    assert head.depth == 4
    assert (head.ids is not None) == (variant == "own ends")


@pytest.mark.parametrize(
    ("variant", "windows", "causal"),
    [
        ("full", (None, None), (False, False)),
        ("sliding", (12, None), (True, False)),
        ("not causal", (12, 12), (False, False)),
        ("swa keys", (9, 9), (True, True)),
    ],
)
def test_windows_are_those_of_the_config(
    variant: str, windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    settings = read_settings(config_of(variant, (0, 1, 3)))
    assert settings.windows == windows
    assert settings.causal == causal


@pytest.mark.parametrize(
    ("top", "inner", "causal"),
    [
        ({}, {}, (True, False)),
        ({"is_causal": False}, {}, (False, False)),
        ({"is_causal": True}, {}, (True, True)),
        ({}, {"is_causal": False}, (False, False)),
        ({}, {"causal": False}, (False, False)),
        ({"is_causal": False}, {"causal": True}, (False, False)),
        ({"is_causal": True}, {"is_causal": False}, (True, True)),
        ({"dflash_query_causal": True}, {}, (True, True)),
        ({"sliding_window_non_causal": True}, {}, (False, False)),
        ({"sliding_window_non_causal": False}, {}, (True, False)),
    ],
)
def test_whether_rows_see_later_ones_is_said_in_several_ways(
    top: dict[str, Any], inner: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    config = {**with_own(config_of("sliding", (0, 1, 3)), **inner), **top}
    assert read_settings(config).causal == causal


@pytest.mark.parametrize(
    ("keys", "anchor", "depth"),
    [
        ({}, "given", 4),
        ({"sample_from_anchor": True}, "samples", 5),
        ({"sample_from_anchor": False}, "given", 4),
        ({"speculators_config": {"proposal_methods": [{}]}}, "given", 4),
        *(
            (
                {
                    "speculators_config": {
                        "proposal_methods": [{"speculative_tokens": drafts}]
                    }
                },
                anchor,
                depth,
            )
            for drafts, anchor, depth in (
                (5, "samples", 5),
                (4, "given", 4),
                (3, "given", 4),
            )
        ),
    ],
)
def test_what_a_row_is_for_is_said_or_counted(
    keys: dict[str, Any], anchor: str, depth: int
) -> None:
    settings = read_settings({**config_of("full", (0, 1, 3)), **keys})
    assert (settings.anchor, settings.depth) == (anchor, depth)


@pytest.mark.parametrize(
    ("keys", "features", "expected"),
    [
        ({}, [5], (1, 9, 17, 25, 33)),
        ({}, [2], (1, 33)),
        ({"target_layer_ids": [3, 1, 35]}, [3], (3, 1, 35)),
        ({"aux_hidden_state_layer_ids": [2, 10, 36]}, [3], (1, 9, 35)),
        ({"target_layer_ids": [1, 5]}, [], (1, 5)),
        ({"target_layer_ids": [1, 5]}, [1, 2], (1, 5)),
        ({"aux_hidden_state_layer_ids": [0, 5]}, [2], (-1, 4)),
        ({"num_target_layers": 36}, [2], (1, 33)),
        ({"target_layer_ids": [2, 36]}, [2], (1, 35)),
    ],
)
def test_layers_are_counted_from_0(
    keys: dict[str, Any], features: list[int], expected: tuple[int, ...]
) -> None:
    for config in (keys, {"dflash_config": keys}):
        assert layer_readings(config, 36, features).usual == expected


@pytest.mark.parametrize(
    ("keys", "features", "message"),
    [
        ({"num_target_layers": 28}, [5], "num_target_layers 28, but this target has"),
        ({}, [1], "has no target_layer_ids"),
        ({}, [2, 4], r"has no target_layer_ids, .* takes 2 or 4 of the target's 36"),
        ({}, [37], "takes 37 of the target's 36"),
        ({"target_layer_ids": [1, 37]}, [2], "this target's layers go from 0 to 35"),
        ({"aux_hidden_state_layer_ids": [-1, 5]}, [2], r"layers \[-2, 4\]"),
        ({"target_layer_ids": [1, 5]}, [3], "fc .* takes 3 layers .* names 2"),
        ({"target_layer_ids": []}, [], "a list of whole numbers"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    keys: dict[str, Any], features: list[int], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        layer_readings({"dflash_config": keys}, 36, features)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"projector_type": "dspark"}, "projector_type 'dspark'"),
        ({"markov_rank": 8}, "markov_rank 8"),
        ({"mask_token_id": None}, "mask_token_id None"),
        ({"block_size": 1}, "block_size 1"),
        ({"use_swa": True}, "use_swa True and layer_types"),
        (
            {"layer_types": ["full_attention"]},
            "which has to be a list of 2 entries",
        ),
    ],
)
def test_a_config_that_is_not_known_is_refused(
    keys: dict[str, Any], message: str
) -> None:
    config = config_of("full", (0, 1, 3))
    config["layer_types"] = ["full_attention"] * 2
    with pytest.raises(ModelFolderError, match=message):
        read_settings(with_own(config, **keys))


def test_a_window_without_a_size_is_refused() -> None:
    config = config_of("sliding", (0, 1, 3))
    del config["sliding_window"]
    with pytest.raises(ModelFolderError, match="sliding_window None"):
        read_settings(config)


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    folder = write_dflash(tmp_path / "mask", "full")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelFolderError, match=r"mask_embedding.pt: a mask that is no"):
        load_dflash(folder, model)
    folder = write_dflash(tmp_path / "id", "full")
    config = with_own(config_of("full", (0, 1, 3)), mask_token_id=256)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"mask_token_id 256, but .* only 256"):
        load_dflash(folder, model)
    folder = write_dflash(tmp_path / "norm", "full")
    file = folder / "model.safetensors"
    loaded: Any = mx.load(str(file))
    loaded = {name: value for name, value in loaded.items() if name != "norm.weight"}
    mx.eval(list(loaded.values()))
    mx.save_safetensors(str(file), loaded)
    with pytest.raises(ModelFolderError, match=r"DFlash drafter lacks norm\.weight"):
        load_dflash(folder, model)
