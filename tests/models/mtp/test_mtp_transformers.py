"""MTP heads, compared with transformers' own heads, and on transformers' targets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.drafters.mtp_bench import (
    SLOTS,
    Bench,
    assert_close,
    ids,
    make_bench,
    states,
)
from support.references.mtp.families import FAMILIES
from support.references.numerics import Array
from support.references.torch_heads import (
    OWN_MTP,
    own_mtp_rows,
)


@pytest.mark.parametrize("name", OWN_MTP)
def test_heads_equal_the_mtp_module_of_transformers(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    here = make_bench(tmp_path, family)
    mtp, hidden = here.load(), here.hidden
    for layer, caches in enumerate(mtp.head.new_caches()):
        tokens = here.tokens[layer : layer + SLOTS]
        normed = own_mtp_rows(
            family,
            here.folder.path,
            hidden,
            tokens,
            embedding=here.embedding,
            layer=layer,
        )
        logits = normed @ own_head(here, layer).T
        out = mtp.rows(states(hidden), ids(tokens), caches, layer=layer)
        assert_close(out.logits, logits)
        hidden = here.expected(hidden, tokens, layer).recycled


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "qwen3_5_tied", "qwen3_5_moe"]
)
def test_target_and_head_of_one_folder_equal_those_of_transformers(
    tmp_path: Path, name: str
) -> None:
    here = make_bench(tmp_path, FAMILIES[name])
    tokens = here.tokens[: SLOTS + 1]
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        theirs = target.eval()(torch.tensor(tokens)[None], output_hidden_states=True)
    model, mtp = here.folder.model, here.load()
    assert_close(model(ids(tokens)), theirs.logits[0].numpy())
    normed = theirs.hidden_states[-1][0].numpy().astype(np.float64)
    ours = model.model(ids(tokens))
    assert_close(ours, normed)
    expected = here.expected(normed[:-1], tokens[1:])
    out = mtp.rows(ours[:, :-1], ids(tokens[1:]), mtp.head.new_caches()[0])
    assert_close(out.logits, expected.logits)


def own_head(here: Bench, layer: int) -> Array:
    """Return the output matrix of a layer: its own, or the target's."""
    name = here.family.names[layer].head
    if name is None:
        return here.head
    return here.folder.tensors[f"{name}.weight"].astype(np.float64)
