"""Measures a verify of latent attention: asked as single rows are, and mlx-lm's way.

A DeepSeek-V3-shaped model with random weights, as no trained one is bundled. The two
ways take turns over the same caches; each figure is the median over the repeats, in
plain steps of the same context.

    python scripts/benchmark_absorbed.py --context 512 --context 4096
"""

import json
import time
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from mlx_speculation.models import Lane

ARGS: dict[str, Any] = {
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

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 512 and 4,096.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=2, help="By default 2, 5 and 9.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    blas: Annotated[
        BlasName, typer.Option(help="What multiplies float32 on a Linux CPU.")
    ] = "auto",
) -> None:
    """Print what rows cost, in plain steps."""
    chosen = use_blas(blas)
    found = []
    for held in context or [512, 4096]:
        for line in _measure(held, rows or [2, 5, 9], repeats):
            found.append(line)
            typer.echo(
                "{context:6} tokens, {rows:2} rows: {latents:5.2f} as single rows, "
                "{native:5.2f} in mlx-lm's way".format(**line),
                err=True,
            )
    print(json.dumps({"blas": chosen.detail, "plain_steps": found}))


def _measure(context: int, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    import mlx.core as mx
    from mlx_lm.models import deepseek_v3

    from mlx_speculation.models import Lane, ModelHooks

    model = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(ARGS))
    mx.eval(model.parameters())
    native = Lane(model)
    native.feed([index % 4000 for index in range(context)])
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats + 1):
        for width in [1, *rows]:
            seconds = _round(native, width)
            times.setdefault(("native", width), []).append(seconds)
            hooks = ModelHooks(model)
            times.setdefault(("latents", width), []).append(_round(native, width))
            hooks.remove()
    middle = {key: median(each[1:]) for key, each in times.items()}
    plain = middle["native", 1]
    return [
        {
            "context": context,
            "rows": width,
            "latents": round(middle["latents", width] / plain, 3),
            "native": round(middle["native", width] / plain, 3),
        }
        for width in rows
    ]


def _round(lane: "Lane", width: int) -> float:
    """Return the seconds of a forward that is taken back."""
    import mlx.core as mx

    started = time.perf_counter()
    with lane.begin() as lane_round:
        mx.eval(lane_round.forward(mx.arange(width)))
    return time.perf_counter() - started


if __name__ == "__main__":
    run(app)
