"""Ways to compute attention and forwards of a few rows, as cases of operations.py.

A case is its name and what is timed, by the name of the way; each waits for what it
computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, product
from typing import Any

import mlx.core as mx
from mlx_lm.models import deepseek_v3
from mlx_lm.models.base import create_causal_mask

from mlx_speculation import load
from mlx_speculation.demo import demo_models
from mlx_speculation.models import Lane, ModelHooks, round_context
from mlx_speculation.models.round_context import (
    cuda_serves,
    rows_of_a_round,
    x86_serves,
)

Case = tuple[str, dict[str, Callable[[], Any]]]
HEADS, KEY_HEADS, DIM = 32, 8, 128
STEP = 256  # rows that a buffer grows by
FEW = [(64, 16, 64), (32, 8, 128), (16, 2, 256)]  # heads, key heads, dimension
TOLERANCE = 2e-2  # of bfloat16 attention
LATENT: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 4,
    "max_position_embeddings": 32768,
}


def attention(rows: Sequence[int], keys: Sequence[int]) -> Iterator[Case]:
    """Attend over a growing, a constant and a padded number of keys."""
    for first, width in product(keys, rows):
        queries = mx.random.normal((1, HEADS, width, DIM)).astype(mx.bfloat16)
        room = 2 * first + 1024
        buffer = mx.random.normal((1, KEY_HEADS, room, DIM)).astype(mx.bfloat16)
        mx.eval(queries, buffer)

        def attend(
            shown: int, mask: Any, queries: Any = queries, buffer: Any = buffer
        ) -> mx.array:
            held = buffer[..., :shown, :]
            return mx.fast.scaled_dot_product_attention(
                queries, held, held, scale=DIM**-0.5, mask=mask
            )

        def padded(length: int, width: int = width, attend: Any = attend) -> mx.array:
            shown = -(-length // STEP) * STEP
            seen = create_causal_mask(width, length - width)
            found: mx.array = attend(shown, mx.pad(seen, [(0, 0), (0, shown - length)]))
            return found

        def growing(
            way: Callable[[int], mx.array], first: int = first, room: int = room
        ) -> Callable[[], None]:
            calls = count()
            return lambda: mx.eval(way(first + next(calls) % (room - first - STEP)))

        causal = "causal" if width > 1 else None
        _check_close(attend(first, causal), padded(first))
        yield (
            f"{width} rows, {first} keys",
            {
                "same": lambda a=attend, n=first, m=causal: mx.eval(a(n, m)),  # type: ignore[misc]
                "new": growing(lambda n, a=attend, m=causal: a(n, m)),  # type: ignore[misc]
                "padded": growing(padded),
            },
        )


def few_rows(rows: Sequence[int], keys: Sequence[int]) -> Iterator[Case]:
    """Attend with masks of a batch, by the kernel for few rows and by mlx."""
    if not cuda_serves():
        return
    from mlx_speculation.models.cuda.attention import attention as kernel

    for (heads, key_heads, dim), columns, width in product(FEW, keys, rows):
        queries = mx.random.normal((16, heads, width, dim)).astype(mx.bfloat16)
        held = mx.random.normal((2, 16, key_heads, columns + 64, dim))
        k, v = held.astype(mx.bfloat16)[:, :, :, :columns]
        ends = mx.arange(columns - width - 20, columns - 20)[:, None]
        mask = mx.broadcast_to(mx.arange(columns) <= ends, (16, 1, width, columns))
        mx.eval(queries, k, v, mask)

        def theirs(q: Any = queries, k: Any = k, v: Any = v, m: Any = mask) -> mx.array:
            return mx.fast.scaled_dot_product_attention(
                q, k, v, scale=q.shape[-1] ** -0.5, mask=m
            )

        def ours(q: Any = queries, k: Any = k, v: Any = v, m: Any = mask) -> mx.array:
            return kernel(q, k, v, q.shape[-1] ** -0.5, m)

        _check_close(theirs(), ours())
        yield (
            f"16 x {width} rows, {columns} keys, {heads}/{key_heads} heads of {dim}",
            {
                "mlx": lambda act=theirs: mx.eval(act()),  # type: ignore[misc]
                "kernel": lambda act=ours: mx.eval(act()),  # type: ignore[misc]
            },
        )


def absorbed(rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Verify with latent attention, in mlx-lm's way and with our hooks."""
    native = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(LATENT))
    hooked = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(LATENT))
    hooked.update(native.parameters())
    mx.eval(native.parameters())
    hooks = ModelHooks(hooked)
    try:
        for held, width in product(contexts, rows):
            lanes = {"mlx-lm": Lane(native), "as single rows": Lane(hooked)}
            acts = {name: verifier(lane, held, width) for name, lane in lanes.items()}
            _check_close(*(act() for act in acts.values()))
            yield f"{width} rows, {held} tokens", acts
    finally:
        hooks.remove()


def stand_ins(rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Verify with mlx's own operations, and with what stands in for them."""
    if not x86_serves():
        return
    for name in ("dense", "sliding", "hybrid"):
        model = load(demo_models()[name])[0]
        hooks = ModelHooks(model)
        for held, width in product(contexts, rows):
            ours = verifier(Lane(model, sliding="slack"), held, width)

            def theirs(ours: Any = ours) -> Any:
                with _mlx_alone():
                    return ours()

            _check_close(theirs(), ours())
            acts = {"mlx": theirs, "stand-ins": ours}
            yield f"{name}, {width} rows, {held} tokens", acts
        hooks.remove()


def verifier(lane: Lane, held: int, width: int) -> Callable[[], mx.array]:
    """Return a forward of a round behind a text, which is taken back each time."""
    lane.feed([index * 37 % 2000 + 3 for index in range(held)])
    tokens = mx.arange(5, 5 + width)

    def verify() -> mx.array:
        with lane.begin() as lane_round, rows_of_a_round(width):
            logits = lane_round.forward(tokens)
            mx.eval(logits)
        return logits

    return verify


def _check_close(wanted: mx.array, found: mx.array) -> None:
    difference = float(mx.abs(wanted - found).max().item())  # type: ignore[arg-type]
    assert difference <= TOLERANCE, f"two ways differ by {difference}"


@contextmanager
def _mlx_alone() -> Iterator[None]:
    """Let rounds take mlx's own operations inside the block."""
    here: Any = round_context._device_here
    round_context._device_here = lambda: None
    try:
        yield
    finally:
        round_context._device_here = here


DEVICE: dict[str, Callable[[Sequence[int], Sequence[int]], Iterator[Case]]] = {
    "attention": attention,
    "few-rows": few_rows,
    "absorbed": absorbed,
    "stand-ins": stand_ins,
}
