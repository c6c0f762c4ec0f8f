"""What config.json leaves open is told by what a drafter guesses of its target's text.

The target's next token depends on the newest alone, and the drafter is made by hand: a
row sees the position before the block, and its layer's state there, which names the
token after the next.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine import DSparkDraft
from mlx_speculation.errors import ConventionError
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.dspark.load import load_dspark
from mlx_speculation.models.gemma_assistant import starts_for
from support.covering import covering
from support.models.block_checkpoints import BLOCK, PACKAGINGS, write_block
from support.models.dflash_checkpoints import DIM, VOCAB
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

STARTS = starts_for(byte_tokenizer())
LAYERS = (1, 3)


def bigram_target() -> Any:
    """Return a target without attention, which is sure of what comes next."""
    model: Any = build("llama", layers=6, seed=3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        # Layers return what differs from one to the next.
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 6
    model.lm_head.weight = model.lm_head.weight * 40
    return model


def knowing(folder: Path, model: Any, layers: tuple[int, ...], given: bool) -> Path:
    """Write a drafter that reads these layers, and guesses right."""
    taps = HiddenStates(model, layers=layers)
    every = mx.arange(VOCAB)[:, None]
    with taps.collect() as states:
        following = mx.argmax(model(every)[:, 0], axis=-1)
    outputs = mx.concatenate([states.layer(i)[:, 0] for i in layers], axis=-1)
    taps.remove()
    rng = mx.random.key(5)
    mixed = mx.random.normal((DIM, outputs.shape[1]), key=rng)
    context = mx.fast.rms_norm(outputs @ mixed.T, None, 1e-6)
    come, newest = set(), [start[-1] for start in STARTS]
    for _ in range(24):
        come |= set(newest)
        newest = [int(following[token]) for token in newest]
    seen = mx.array(sorted(come))
    wanted = mx.eye(VOCAB)[following[following[seen]]]
    fitted = np.linalg.lstsq(np.array(context[seen]), np.array(wanted), rcond=None)
    head = mx.array(fitted[0].T.astype(np.float32)) * 8
    changed = {
        "fc.weight": mixed,
        "hidden_norm.weight": mx.ones(DIM),
        "norm.weight": mx.ones(DIM),
        "embed_tokens.weight": mx.zeros((VOCAB, DIM)),
        "lm_head.weight": head,
    }
    for index in range(2):
        layer = f"layers.{index}."
        changed[f"{layer}mlp.down_proj.weight"] = mx.zeros((DIM, 96))
        changed[f"{layer}self_attn.q_proj.weight"] = mx.zeros((DIM, DIM))
        changed[f"{layer}self_attn.k_proj.weight"] = mx.zeros((DIM, DIM))
        changed[f"{layer}self_attn.v_proj.weight"] = mx.eye(DIM)
        out = mx.eye(DIM) if index == 0 else mx.zeros((DIM, DIM))
        changed[f"{layer}self_attn.o_proj.weight"] = out
    write_block(folder, "speculators", layers, **changed)
    file = str(folder / "model.safetensors")
    held: Any = mx.load(file)
    left = {
        name: value
        for name, value in held.items()
        if not name.startswith(("markov", "confidence", "d2t", "t2d"))
    }
    mx.eval(list(left.values()))
    mx.save_safetensors(file, left)
    config = PACKAGINGS["speculators"].config(layers)
    del config["speculators_config"], config["draft_vocab_size"]
    config["transformer_layer_config"] |= {
        # The first layer sees the position before the block, and its own.
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3 if given else 2,
        "num_key_value_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("given", "counted"), covering((False, True), ("tuple", "layers"))
)
def test_the_reading_in_which_it_guesses_is_taken(
    counted: str, given: bool, tmp_path: Path
) -> None:
    """The file says `aux_hidden_state_layer_ids` one more than `LAYERS`."""
    model = bigram_target()
    right = LAYERS if counted == "tuple" else tuple(layer + 1 for layer in LAYERS)
    folder = knowing(tmp_path, model, right, given)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["aux_hidden_state_layer_ids"] = [layer + 1 for layer in LAYERS]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = load_dspark(folder, model, starts=STARTS)
    assert found.layers == right
    assert found.head.depth == (BLOCK - 1 if given else BLOCK)


def test_one_that_guesses_in_no_reading_is_refused(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "speculators", (0, 1, 2))
    with pytest.raises(ConventionError, match="whatever it is taken for: Reading"):
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
