"""Rotary settings of draft layers: spellings, shapes, and contradictory values."""

import math
from typing import Any

import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.rotation import (
    FULL,
    SLIDING,
    Rotation,
    read_rotation,
)
from mlx_speculation.models.dflash.config import read_settings as read_dflash
from mlx_speculation.models.dflash.head import DFlashLayer
from mlx_speculation.models.dflash2.config import read_settings as read_dflash2
from mlx_speculation.models.dspark.config import read_settings as read_dspark
from mlx_speculation.models.eagle.config import read_settings as read_eagle
from mlx_speculation.models.eagle.layers import EagleLayer, LaterLayer
from mlx_speculation.models.gemma_assistant.config import read_assistant_settings
from mlx_speculation.training.kinds.new_head import layer_sizes
from support.models import dflash_checkpoints as dflash
from support.models import eagle_checkpoints as eagle
from support.models.assistant_checkpoints import config_of as assistant_config
from support.models.block_checkpoints import PACKAGINGS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
Config = dict[str, Any]


@pytest.mark.parametrize(
    ("config", "kind", "expected"),
    [
        ({"rope_theta": None}, FULL, Rotation(1e4)),
        ({"rope_theta": 500_000}, FULL, Rotation(5e5)),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 5e5}}, FULL, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, FULL, Rotation(5e5)),
        ({"rope_parameters": {FULL: {"rope_theta": 5e5}}}, FULL, Rotation(5e5)),
        (
            {"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {}}},
            SLIDING,
            Rotation(1e4),
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {SLIDING: {"rope_theta": 1e3}}},
            FULL,
            5e5,
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_parameters": {
                    FULL: {"rope_theta": 5e5},
                    SLIDING: {"rope_theta": 1e3},
                },
            },
            SLIDING,
            1e3,
        ),
        ({"text_config": {"rope_parameters": {"rope_theta": 5e5}}}, FULL, 5e5),
        ({"rope_theta": 5e5, "text_config": {"rope_theta": 500_000}}, FULL, 5e5),
        ({"transformer_layer_config": {"rope_theta": 5e5}}, FULL, 5e5),
        ({"dflash_config": {"rope_theta": 5e5}}, FULL, 5e5),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, FULL, LLAMA3),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "yarn"}},
            FULL,
            {**YARN, "rope_type": "yarn"},
        ),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "default"}},
            FULL,
            Rotation(1e4),
        ),
        ({"partial_rotary_factor": 0.5}, FULL, Rotation(1e4, factor=0.5)),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            FULL,
            Rotation(1e4, factor=0.5),
        ),
        (
            {
                "partial_rotary_factor": 1.0,
                "global_partial_rotary_factor": 0.25,
                "rope_parameters": {FULL: {"partial_rotary_factor": 0.25}},
            },
            FULL,
            Rotation(1e4, factor=0.25),
        ),
    ],
)
def test_every_spelling_is_read(config: Config, kind: str, expected: Any) -> None:
    rotation = read_rotation(config, "head", kind)
    if isinstance(expected, float):
        assert rotation.theta == expected
    elif isinstance(expected, dict):
        wanted = {key: value for key, value in expected.items() if key != "type"}
        assert rotation.scaling == wanted
    else:
        assert rotation == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            r"rope_theta 10000.0 in rope_theta and 500000.0 in "
            r"rope_parameters.rope_theta",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {FULL: {"rope_theta": 5e5}}},
            r"500000.0 in rope_parameters.full_attention.rope_theta",
        ),
        (
            {"rope_theta": 1e4, "text_config": {"rope_theta": 5e5}},
            r"500000.0 in text_config.rope_theta",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            r"rope_type 'llama3' in rope_scaling.rope_type and 'default' in "
            r"rope_parameters.rope_type",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}},
            r"factor 8.0 in rope_scaling.factor and 4.0 in rope_parameters.factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            r"'yarn' in rope_scaling.type and 'linear' in rope_scaling.rope_type",
        ),
        (
            {
                "partial_rotary_factor": 1.0,
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            r"0.5 in rope_parameters.partial_rotary_factor",
        ),
        ({"rope_theta": "1e6"}, "rope_theta '1e6', which has to be a finite number"),
        ({"rope_theta": True}, "rope_theta True"),
        ({"rope_theta": [1e4, 1e4]}, r"rope_theta \[10000.0, 10000.0\]"),
        ({"rope_theta": 0}, "rope_theta 0, which has to be a finite number above 0"),
        ({"rope_theta": -1e4}, "has to be a finite number above 0"),
        ({"rope_theta": math.inf}, "rope_theta inf, which has to be a finite number"),
        ({"rope_theta": math.nan}, "rope_theta nan"),
        ({"rope_theta": 10**400}, "rope_theta 1000"),
        ({"partial_rotary_factor": 1.5}, "1.5, which has to be a number up to 1"),
        ({"rope_scaling": "linear"}, "'linear', which has to be an object or null"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\], which has to be an object"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type 3, which has to be a string"),
        (
            {"rope_scaling": {"factor": 8.0}},
            "has the rotation options factor, but no rope_type",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "8"}},
            "rope_scaling.factor '8', which has to be a finite number",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4}}},
            "for sliding_attention, but no entry for its layers of full_attention",
        ),
    ],
)
def test_wrong_shapes_and_contradictions_are_named(
    config: Config, message: str
) -> None:
    with pytest.raises(ModelFolderError, match=f"config.json of the head .*{message}"):
        read_rotation(config, "head")


def _eagle(name: str) -> Config:
    return eagle.config_of((eagle.DIALECTS | eagle.PARALLEL)[name], (0, 1, 3))


def _without_rope(config: Config) -> Config:
    parts = ("transformer_layer_config", "text_config")
    kept = {
        key: _without_rope(value) if key in parts else value
        for key, value in config.items()
    }
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        kept.pop(key, None)
    return kept


def _gemma_theta(args: Any) -> Any:
    return args.rope_parameters[FULL]["rope_theta"]


# A config.json of each kind, and a function that reads its rope base.
KINDS: dict[str, tuple[Config, Any]] = {
    "eagle": (_eagle("specforge"), lambda c: read_eagle(c).layer.rope_theta),
    "eagle, nested": (
        _eagle("speculators"),
        lambda c: read_eagle(c).layer.rope_theta,
    ),
    "eagle, gemma": (
        _eagle("deepspec gemma"),
        lambda c: _gemma_theta(read_eagle(c).gemma),
    ),
    "peagle": (_eagle("peagle"), lambda c: read_eagle(c).layer.rope_theta),
    "dflash": (
        dflash.config_of("full", (0, 1, 3)),
        lambda c: read_dflash(c).layers.rope_theta,
    ),
    "dflash2": (
        PACKAGINGS["dflash2"].config((0, 1, 3)),
        lambda c: read_dflash2(c).blocks.layers.rope_theta,
    ),
    "dspark": (
        PACKAGINGS["deepspec"].config((0, 1, 3)),
        lambda c: read_dspark(c).blocks.layers.rope_theta,
    ),
    "dspark, gemma": (
        PACKAGINGS["deepspec, gemma"].config((0, 1, 3)),
        lambda c: _gemma_theta(read_dspark(c).gemma),
    ),
    "assistant": (
        assistant_config("shared"),
        lambda c: _gemma_theta(read_assistant_settings(c).layers),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_draft_reads_every_spelling(name: str) -> None:
    given, theta = KINDS[name]
    config = _without_rope(given)
    entries = {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 5e5}}
    nested = {"rope_parameters": entries}
    assert theta({**config, **nested}) == 5e5
    assert theta({**config, "rope_parameters": {"rope_theta": 5e5}}) == 5e5
    part = {**config.get("text_config", config), **nested}
    assert theta({**config, "text_config": part}) == 5e5
    with pytest.raises(ModelFolderError, match="contradict each other"):
        theta({**config, **nested, "rope_theta": 1e4})
    with pytest.raises(ModelFolderError, match=r"'llama3' .* 'default'"):
        theta(
            {
                **config,
                "rope_scaling": LLAMA3,
                "rope_parameters": {"rope_type": "default"},
            }
        )
    for key in ("rope_theta", "rope_parameters"):
        with pytest.raises(ModelFolderError, match=f"{key} '5e5'"):
            theta({**config, key: "5e5"})


def test_sizes_may_stand_under_text_config() -> None:
    """If sizes are at the top level too, `text_config` describes the target."""
    for name in ("eagle", "dflash", "dspark"):
        given, theta = KINDS[name]
        layers = {**_without_rope(given), "rope_theta": 5e5}
        kept = ("architectures", "dflash_config", "eagle_config", "block_size")
        top = {key: given[key] for key in (*kept, "mask_token_id") if key in given}
        assert theta({**top, "text_config": layers}) == 5e5
    target = {"hidden_size": 96, "num_hidden_layers": 8}
    settings = read_eagle({**_eagle("specforge"), "text_config": target})
    assert settings.layer.hidden_size == 64


def test_layers_of_two_kinds_rotate_as_their_entries_say() -> None:
    rope = {
        FULL: {"rope_theta": 5e5, **LLAMA3},
        SLIDING: {"rope_theta": 1e3, "rope_type": "default"},
    }
    config = dflash.config_of("sliding", (0, 1, 3))
    del config["rope_theta"]
    blocks = read_dflash({**config, "rope_parameters": rope})
    made = [DFlashLayer(blocks, index).self_attn.rope for index in range(2)]
    assert made[0].base == 1e3
    assert isinstance(made[1], Llama3RoPE)
    config = _without_rope(_eagle("several layers"))
    settings = read_eagle({**config, "rope_parameters": rope})
    assert isinstance(EagleLayer(settings).self_attn.rope, Llama3RoPE)
    assert LaterLayer(settings, 1).self_attn.rope.base == 1e3


def test_gemmas_usual_rotation_is_taken_where_none_is_stated() -> None:
    config = _without_rope(assistant_config("shared"))
    made = read_assistant_settings(config).layers.rope_parameters
    assert made == {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }


def test_an_entry_of_sliding_layers_changes_gemmas_usual_rotation() -> None:
    """A theta at the top is that of full attention alone."""
    config = _without_rope(assistant_config("shared"))
    flat = {**config, "rope_theta": 5e5}
    both = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 2e4}}
    entries = {**config, "rope_parameters": both}
    for given, thetas in (flat, (5e5, 1e4)), (entries, (1e6, 2e4)):
        made = read_assistant_settings(given).layers.rope_parameters
        assert made is not None
        assert (made[FULL]["rope_theta"], made[SLIDING]["rope_theta"]) == thetas


def test_a_new_head_takes_its_targets_theta() -> None:
    for config in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}},
    ):
        assert layer_sizes(config, 64)["rope_theta"] == 5e5
