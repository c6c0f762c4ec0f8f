"""A probe of a drafter's guesses decides what config.json leaves open."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine import DSparkDraft
from mlx_speculation.errors import ConventionError
from mlx_speculation.models.dspark.load import load_dspark
from support.covering import covering
from support.models.block_checkpoints import BLOCK, write_block
from support.models.knowing_blocks import STARTS, bigram_target, knowing
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

LAYERS = (1, 3)


@pytest.mark.parametrize(
    ("given", "counted"), covering((False, True), ("tuple", "layers"))
)
def test_the_reading_in_which_it_drafts_well_is_taken(
    counted: str, given: bool, tmp_path: Path
) -> None:
    model = bigram_target()
    right = LAYERS if counted == "tuple" else tuple(layer + 1 for layer in LAYERS)
    folder = knowing(tmp_path, model, right, given)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["aux_hidden_state_layer_ids"] = [layer + 1 for layer in LAYERS]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    drafter = load_dspark(folder, model, starts=STARTS)
    assert drafter.layers == right
    assert drafter.head.depth == (BLOCK - 1 if given else BLOCK)


def test_one_that_drafts_well_in_no_reading_is_refused(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "speculators", (0, 1, 2))
    with pytest.raises(ConventionError, match="clearly better than by chance: Reading"):
        load_dspark(folder, build("llama", layers=4), starts=STARTS)


def test_without_a_tokenizer_the_usual_reading_is_taken(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "speculators", (0, 1, 2))
    assert load_dspark(folder, build("llama", layers=4)).layers == (0, 1, 2)


def test_a_folder_is_probed_with_the_generators_tokenizer(tmp_path: Path) -> None:
    model = bigram_target()
    folder = knowing(tmp_path, model, LAYERS, given=True)
    made = SpeculativeGenerator(model, byte_tokenizer(), draft=folder)
    draft: Any = made._setup.draft
    assert isinstance(draft, DSparkDraft)
    assert draft.head.settings.anchor == "given"
    result = made.generate(list(STARTS[0]), max_tokens=12, draft_length=1)
    assert result.stats.acceptance_rate > 0.3
