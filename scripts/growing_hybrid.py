"""Makes the hybrid demo target large without changing what it says; see growing.py.

Of mlx-lm's qwen3_5, with tied ends and no experts. With t copies of everything, so that
each sub-layer gets [x x ... x] and has to give [y y ... y]:

    norms of the stream     tiled: the mean of squares of t copies is that of one
    attention               heads tiled. A head's rows of q_proj are its query and its
                            output gate, which stay together; query head h reads key
                            head h // r, and r stays, so each copy reads its own keys
    gated delta             heads tiled, in the rows for q, k and v each for themselves
                            (value head h is served by key head h // r); the
                            convolution is one kernel for each of these rows, the
                            decays, betas and gates z go with their head, and the norm
                            is over one head: no state changes, there are t of each
    MLP                     hidden units tiled
    embedding, final norm   tiled; the norm divided by t, as the tied output sums copies

Deeper in the same order of layers, after the last one. A further layer is the last of
its kind with output projections of zero: its states and keys cost what they cost.

The MTP head is grown likewise, so that it stays one layer of the target's size, as in
released checkpoints: a drafter that costs what theirs cost. (The EAGLE-3 head of the
dense target keeps its size instead.) Its projection reads t copies of the embedding
and then t of the state. The state comes from a norm that was divided by t, which the
head's own norm undoes; its epsilon is divided by t * t, to be the same beside it.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from growing import (
    Growth,
    Layout,
    dense_parameters,
    grow,
    parameters_of,
    put,
    quantize,
    tiled,
)
from mlx_lm.models import qwen3_5

from mlx_speculation.engine import MtpDraft
from mlx_speculation.models.mtp import MtpHead, load_mtp_head
from mlx_speculation.models.mtp import blocks as mtp_blocks
from mlx_speculation.models.mtp.head import MtpLayer

HYBRID_SHAPES = {
    "as it is": Growth(width=1, layers=6),
    "1B": Growth(width=4, layers=24),
    "8B": Growth(width=8, layers=48),
}
OUTPUTS = (
    "self_attn.o_proj.weight",
    "linear_attn.out_proj.weight",
    "mlp.down_proj.weight",
)
# Of one head each, so that no copy changes them.
WITHIN_A_HEAD = ("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight")


def grow_hybrid(
    model: qwen3_5.Model,
    growth: Growth,
    dtype: mx.Dtype = mx.bfloat16,
    *,
    bits: int | None = None,
) -> qwen3_5.Model:
    """Return a larger model of the same function; see `grow`.

    Raises:
        ValueError: it has experts, or an output layer of its own.
    """
    args = model.language_model.args
    if args.num_experts or not args.tie_word_embeddings:
        raise ValueError(
            f"the model has {args.num_experts} experts and tie_word_embeddings="
            f"{args.tie_word_embeddings}; what can be grown has 0 and True"
        )
    larger: qwen3_5.Model = grow(model, growth, dtype, bits=bits, layout=_layout(model))
    return larger


def fit_mtp_head(
    folder: Path,
    small: qwen3_5.Model,
    larger: qwen3_5.Model,
    dtype: mx.Dtype = mx.bfloat16,
    *,
    bits: int | None = None,
) -> MtpDraft:
    """Return the small model's MTP head, grown, as a draft of the grown model.

    Args:
        folder: of the small model, with its head.
        small: the model.
        larger: what it was grown to.
        dtype: of the head's parameters that are not quantized.
        bits: quantize it; None: do not.

    Raises:
        ValueError: its convention mixes states from both sides of a norm.
    """
    head, args = load_mtp_head(folder, small), larger.language_model.args
    convention = head.convention
    if convention.hidden != convention.recycled:
        raise ValueError(
            f"the head reads the state {convention.hidden} and recycles that "
            f"{convention.recycled}, of which one is divided; both have to be the same"
        )
    width = args.hidden_size // small.language_model.args.hidden_size
    blocks = mtp_blocks.qwen(args, {}, 0)
    layer = MtpLayer(
        args.hidden_size, args.rms_norm_eps, blocks, order=convention.order
    )
    if convention.hidden == "after_norm":
        layer.norm_h.eps = args.rms_norm_eps / width**2
    grown = MtpHead([layer], convention, depth=head.depth)
    wider = partial(_wider, small.language_model.args)
    for name, value in dense_parameters(head).items():
        put(grown, name, wider(name, value, width), dtype)
    quantize(grown, bits)
    grown.eval()
    return MtpDraft(larger, grown)


def shares_of(model: nn.Module) -> dict[str, float]:
    """Return which share of a model's parameters sits in which kind of module."""
    counts: Counter[str] = Counter()
    for path, module in model.named_modules():
        kind = path.rpartition(".")[2]
        if kind in ("embed_tokens", "linear_attn", "self_attn", "mlp"):
            counts[kind] += parameters_of(module)
    total = parameters_of(model)
    return {kind: round(count / total, 3) for kind, count in counts.items()}


def _layout(model: qwen3_5.Model) -> Layout:
    args = model.language_model.args
    count, interval = args.num_hidden_layers, args.full_attention_interval

    def larger(growth: Growth) -> nn.Module:
        width = growth.width
        changed = {
            "num_hidden_layers": growth.layers,
            "head_dim": args.head_dim,
            **{name: getattr(args, name) * width for name in _WIDER_ARGUMENTS},
        }
        text = {**model.args.text_config, **changed}
        return qwen3_5.Model(qwen3_5.ModelArgs(model.args.model_type, text))

    def like(index: int) -> int:
        """Return the last small layer of the same kind."""
        attention = (index + 1) % interval == 0
        same = [i for i in range(count) if ((i + 1) % interval == 0) == attention]
        return same[-1]

    return Layout(larger, partial(_wider, args), like, OUTPUTS)


_WIDER_ARGUMENTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def _wider(args: Any, name: str, value: mx.array, width: int) -> mx.array:
    """Return a parameter of the wider model, or of the wider head.

    Args:
        args: those of the small model.
        name: of the parameter; of a layer's, without the layer.
        value: the small one's.
        width: how many copies.
    """
    if name.endswith(WITHIN_A_HEAD):
        return value
    if name.endswith(("model.norm.weight", "layers.0.final.weight")):
        return tiled(value, width) / width
    if name.endswith("embed_tokens.weight"):
        return mx.tile(value, [1, width])
    if name.endswith("layers.0.proj.weight"):  # reads two vectors
        halves = mx.split(value, 2, axis=1)
        return mx.concatenate([tiled(half, width) for half in halves], axis=1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        keys = args.linear_num_key_heads * args.linear_key_head_dim
        parts = mx.split(value, [keys, 2 * keys], axis=0)
        if value.ndim == 3:  # a kernel for each row, [rows, kernel, 1]
            return mx.concatenate([mx.tile(p, [width, 1, 1]) for p in parts], axis=0)
        return mx.concatenate([tiled(part, width) for part in parts], axis=0)
    return tiled(value, width)
