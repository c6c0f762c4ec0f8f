"""Layers are probed or guessed if config.json has no list, or an ambiguous one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import DraftNotice, SpeculativeGenerator
from mlx_speculation.cli.commands import pair
from mlx_speculation.engine import DFlashDraft
from mlx_speculation.errors import ConventionError
from mlx_speculation.models.dflash import load_dflash
from mlx_speculation.models.dflash2 import load_dflash2
from mlx_speculation.models.dspark import load_dspark
from support.models.block_checkpoints import write_block
from support.models.dflash_checkpoints import write_dflash
from support.models.knowing_blocks import STARTS, bigram_target, knowing
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.scripts import save_tiny

AUX = "aux_hidden_state_layer_ids"


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    change(config)
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def unlisted(config: dict[str, Any]) -> None:
    for part in (config, config.get("dflash_config", {})):
        part.pop("target_layer_ids", None)
        part.pop(AUX, None)


@pytest.mark.openblas
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_layers_that_are_not_listed_are_found_by_a_probe(
    kind: str, tmp_path: Path
) -> None:
    model, layers = bigram_target(8), (0, 4, 7)
    folder = changed(knowing(tmp_path, model, layers, True, kind), unlisted)
    load: Any = {"dflash": load_dflash, "dspark": load_dspark}[kind]
    usual, probed = load(folder, model), load(folder, model, starts=STARTS)
    assert usual.layers == (1, 3, 5)
    assert "[1, 3, 5] are read, the usual ones (not probed)" in usual.notice
    assert probed.layers == layers
    assert "[0, 4, 7] are read, found by a probe (the draft agrees" in probed.notice


@pytest.mark.openblas
@pytest.mark.parametrize("counted", ["tuple", "layers"])
def test_the_list_of_a_dflash_drafter_is_probed(counted: str, tmp_path: Path) -> None:
    """A list in speculators' format usually counts the embedding as layer 0."""
    model, right = bigram_target(), (1, 3)
    folder = knowing(tmp_path, model, right, True, "dflash")
    if counted == "layers":
        changed(folder, lambda config: config.update({AUX: list(right)}))
    loaded = load_dflash(folder, model, starts=STARTS)
    assert loaded.layers == right
    assert bool(loaded.notice) == (counted == "layers")
    assert load_dflash(folder, model, layer_ids=counted).notice == ""  # type: ignore[arg-type]


@pytest.mark.openblas
def test_a_guess_is_said_to_who_loads_the_drafter(tmp_path: Path) -> None:
    model = bigram_target(8)
    folder = changed(
        knowing(tmp_path / "d", model, (0, 4, 7), True, "dflash"), unlisted
    )
    with pytest.warns(DraftNotice, match=r"Layers \[0, 4, 7\] are read") as said:
        made = SpeculativeGenerator(model, byte_tokenizer(), draft=folder)
    assert len(said) == 1
    (notice,) = made.notices
    assert notice == str(said[0].message)
    target = save_tiny(tmp_path / "target")
    resolve = partial(pair._resolved, target, model, byte_tokenizer(), False)
    kind = "of kind 'dflash'; shares the target's token ids"
    assert pair._folder(str(folder), resolve) == f"{kind}. {notice}"
    (target / "speculation.json").write_text('{"draft": "../d"}', encoding="utf-8")
    auto = pair._auto(target, resolve)
    assert auto.startswith("takes dflash and lookup: speculation.json names it")
    assert auto.endswith(notice)
    result = made.generate(list(STARTS[0]), max_tokens=12, draft_length=1)
    assert result.stats.acceptance_rate > 0.3
    with pytest.warns(DraftNotice, match="not probed"):
        draft = DFlashDraft.from_folder(folder, model)
    assert SpeculativeGenerator(model, byte_tokenizer(), draft=draft).notices == (
        draft.notice,
    )


def test_a_random_drafter_without_a_list_is_refused(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    dflash = changed(write_dflash(tmp_path / "1", "full"), unlisted)
    dflash2 = changed(write_block(tmp_path / "2", "dflash2"), unlisted)
    for load, folder in ((load_dflash, dflash), (load_dflash2, dflash2)):
        loader: Any = load
        with pytest.raises(ConventionError, match="add target_layer_ids to its"):
            loader(folder, model, starts=STARTS)
        assert loader(folder, model).layers == (0, 2, 3)


def test_a_list_that_leaves_nothing_open_is_not_probed(tmp_path: Path) -> None:
    folder, model = write_dflash(tmp_path, "full"), build("llama", layers=4)
    assert load_dflash(folder, model, starts=STARTS).notice == ""
