"""Gemma 4 assistants on targets, compared with transformers' own pair on torch."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from mlx_speculation.models.gemma_assistant import SharedKv, load_assistant
from support.models.assistant_checkpoints import HEADS, Made, build, config_of, write
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.references.reference_target import read_folder
from support.references.torch_heads import fill

TOLERANCE = 1e-4
WINDOW = 16
# Layers of small targets share keys, and add embeddings per layer. In large targets no
# layers share keys, and full attention uses its keys as values.
SMALL: dict[str, Any] = {"use_double_wide_mlp": False}
LARGE: dict[str, Any] = {
    **SMALL,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


def both(folder: Path, head: str, **text: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return an assistant as loaded here and by transformers, and its config."""
    config = config_of("shared", head, **text)
    write(Made(nn.Module(), build(config), config), folder)
    config, tensors = read_folder(folder)
    # In transformers a row sees one key more than `sliding_window`.
    config["text_config"]["sliding_window"] -= 1
    theirs: Any = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**config)).eval()
    fill(theirs, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    return load_assistant(folder), theirs, config


def build_pair(changes: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return the same target from mlx-lm and from transformers."""
    tiny = TINY_MODELS["gemma4_text"]
    args = {**tiny.args, **changes, "final_logit_softcapping": 30.0}
    model = build_tiny(dataclasses.replace(tiny, args=args))
    kinds = [layer.layer_type for layer in model.layers]
    theirs: Any = Gemma4ForCausalLM(Gemma4TextConfig(**args, layer_types=kinds))
    flat = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    weights = {name: np.array(value) for name, value in flat}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    fill(theirs, weights)
    return model, theirs


@pytest.mark.parametrize("changes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("tokens", [5, WINDOW, 41])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_on_the_target_equal_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], tokens: int, head: str
) -> None:
    model, target = build_pair(changes)
    kv_heads = changes.get("num_global_key_value_heads")
    assistant, theirs, _ = both(
        tmp_path,
        head,
        attention_k_eq_v=kv_heads is not None,
        num_global_key_value_heads=kv_heads,
    )
    ids = np.random.default_rng(4).integers(0, 256, tokens + 1)

    caches = make_prompt_cache(model)
    hidden = model.model(mx.array(ids[:-1])[None], cache=caches)[:, -1:]
    read, stop = SharedKv(model, assistant).read(caches, left_out=0)
    with torch.no_grad():
        out = target.model(
            torch.tensor(ids[:-1])[None], return_shared_kv_states=True, use_cache=False
        )
    state = out.last_hidden_state[:, -1:]
    assert_close(hidden, state)
    assert stop == tokens
    token = int(ids[-1])
    for _ in range(3):
        embedded = model.model.embed_tokens(mx.array([[token]])) * 8.0
        output = assistant.step(embedded, hidden, read, stop - 1)
        with torch.no_grad():
            # The embedding layer of transformers applies the scale.
            scaled = target.get_input_embeddings()(torch.tensor([[token]]))
            wanted = theirs(
                inputs_embeds=torch.cat([scaled, state], dim=-1),
                position_ids=torch.tensor([[stop - 1]]),
                shared_kv_states=dict(out.shared_kv_states),
            )
        logits = wanted.logits[0]
        columns = slice(None) if output.ids is None else np.array(output.ids[0])
        assert_close(output.logits, logits[:, columns])
        assert_close(output.state, wanted.last_hidden_state)
        # Both continue from transformers' state, so that rounding errors do not add up.
        state = wanted.last_hidden_state
        hidden = mx.array(state.numpy())
        token = int(logits.argmax())


def assert_close(ours: mx.array, theirs: Any) -> None:
    wanted = theirs.detach().numpy().astype(np.float64)
    error = np.abs(np.array(ours).astype(np.float64) - wanted).max()
    assert error <= TOLERANCE * np.abs(wanted).max()
