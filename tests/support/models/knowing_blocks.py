"""A block drafter with fitted weights, which predicts the text of its target.

The target has no attention: each token determines the next one. The first row that
drafts attends to the target's states at the position before the block. The token there
determines the block's first token, which determines the token that the row drafts.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_speculation.models import HiddenStates
from mlx_speculation.models.gemma_assistant import starts_for
from support.models.block_checkpoints import PACKAGINGS, write_block
from support.models.dflash_checkpoints import DIM, VOCAB
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

STARTS = starts_for(byte_tokenizer())


def bigram_target(layers: int = 6) -> Any:
    """Return a target without attention whose next token is very probable."""
    model: Any = build("llama", layers=layers, seed=3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        # Makes the outputs of successive layers differ.
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 6
    model.lm_head.weight = model.lm_head.weight * 40
    return model


def knowing(
    folder: Path,
    model: Any,
    layers: tuple[int, ...],
    given: bool,
    kind: str = "dspark",
) -> Path:
    """Write a drafter that reads these layers and predicts right.

    The files have speculators' layout. If `given`, row 0 of a block drafts nothing.
    """
    taps = HiddenStates(model, layers=layers, after_norm=True)
    every = mx.arange(VOCAB)[:, None]
    with taps.collect() as states:
        next_tokens = mx.argmax(model(every)[:, 0], axis=-1)
    last = len(model.layers) - 1  # block drafters read the last layer after the norm
    read = [states.after_norm if i == last else states.layer(i) for i in layers]
    outputs = mx.concatenate(read, axis=-1)[:, 0]
    taps.remove()
    rng = mx.random.key(5)
    mixed = mx.random.normal((DIM, outputs.shape[1]), key=rng)
    context = mx.fast.rms_norm(outputs @ mixed.T, None, 1e-6)
    come, newest = set(), [start[-1] for start in STARTS]
    for _ in range(24):
        come |= set(newest)
        newest = [int(next_tokens[token]) for token in newest]
    seen = mx.array(sorted(come))
    wanted = mx.eye(VOCAB)[next_tokens[next_tokens[seen]]]
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
    loaded: Any = mx.load(file)
    left = {
        name: value
        for name, value in loaded.items()
        if not name.startswith(("markov", "confidence", "d2t", "t2d"))
    }
    mx.eval(list(left.values()))
    mx.save_safetensors(file, left)
    config = PACKAGINGS["speculators"].config(layers)
    config |= {"speculators_model_type": kind, "architectures": [f"{kind}Speculator"]}
    del config["speculators_config"], config["draft_vocab_size"]
    config["transformer_layer_config"] |= {
        # Of the rows that draft, only the first sees the position before the block.
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3 if given else 2,
        "num_key_value_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
