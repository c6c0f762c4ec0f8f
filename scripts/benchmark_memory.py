"""What speculation holds beside plain decoding: peak memory over many rounds.

The bound is 1.05 times the peak of mlx-lm's plain decoding of as many tokens, plus what
speculation says that it holds: the slack of sliding windows, what one round records
for a replay, one recurrent state, the draft's weights and caches, and k + 1 rows of
logits. The peak is taken after the prefill. The last line is one JSON object.

    python scripts/benchmark_memory.py --context 4096 --rounds 200
"""

import gc
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

FLOAT32 = 4  # bytes
SETTLED = 20  # steps after which nothing of the prefill is left

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(name: str, context: int, rounds: int, draft_length: int) -> dict[str, Any]:
    """Run plain decoding and speculation on the same prompt; return bytes."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_speculation import SpeculativeGenerator, load
    from mlx_speculation.caches import leaves

    model, tokenizer = load(demo_models()[name])
    text = "\n\n".join(prompt.text for prompt in demo_prompts())
    prompt = (tokenizer.encode(text) * (1 + context // 1000))[:context]
    most = SETTLED + rounds * (draft_length + 1)
    plain = peak_after(generate_step(mx.array(prompt), model, max_tokens=most))
    recorded, state = recorded_and_state(model, prompt, draft_length + 1)
    extra = slack(model, prompt)
    gc.collect()
    before = mx.get_active_memory()
    draft, _ = load(demo_models()["draft"])
    mx.eval(draft.parameters())
    weights = mx.get_active_memory() - before
    caches = make_prompt_cache(draft)
    draft(mx.array([prompt[: context // 2]]), cache=caches)
    draft(mx.array([prompt[context // 2 :]]), cache=caches)
    draft(mx.array([prompt[:most]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    draft_caches = sum(leaf.nbytes for _, leaf in leaves(caches))
    del caches
    stream = SpeculativeGenerator(
        model, tokenizer, draft=draft, draft_length=draft_length
    ).stream(prompt, max_tokens=most, stop_tokens=())
    peak = peak_after(stream)
    assert stream.stats.rounds >= rounds
    parts = {
        "slack": extra,
        "recorded": recorded,
        "state": state,
        "draft_weights": weights,
        "draft_caches": draft_caches,
        "logits": (draft_length + 1) * len(tokenizer.get_vocab()) * FLOAT32,
    }
    allowed = round(1.05 * plain + sum(parts.values()))
    row = {"target": name, "plain": plain, "peak": peak, "allowed": allowed, **parts}
    print(f"{name}: peak {peak / plain:.3f} of plain, allowed {allowed / plain:.3f}")
    return {**row, "rounds": stream.stats.rounds}


def bytes_of(values: Any) -> int:
    """Count the bytes of all arrays in nested lists, dicts and dataclasses."""
    import mlx.core as mx
    import mlx.nn as nn

    if isinstance(values, mx.array):
        return values.nbytes
    if isinstance(values, nn.Module) or values is None:
        return 0
    if isinstance(values, dict):
        return bytes_of(list(values.values()))
    if isinstance(values, list | tuple):
        return sum(bytes_of(value) for value in values)
    if is_dataclass(values) and not isinstance(values, type):
        return bytes_of([getattr(values, f.name) for f in fields(values)])
    return 0


def recorded_and_state(model: Any, prompt: list[int], rows: int) -> tuple[int, int]:
    """Return the bytes that one round records, and those of one recurrent state."""
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, make_prompt_cache

    from mlx_speculation.caches import RecordingArraysCache, Speculation, leaves
    from mlx_speculation.models import ModelHooks

    caches = make_prompt_cache(model)
    model(mx.array([prompt[:9]]), cache=caches)
    recorders = ModelHooks(model)
    with Speculation(caches) as speculation:
        model(mx.array([prompt[:rows]]), cache=speculation.caches)
        shown = [leaf for _, leaf in leaves(speculation.caches)]
        recorded = sum(
            bytes_of([forward.calls for forward in leaf.forwards])
            for leaf in shown
            if isinstance(leaf, RecordingArraysCache)
        )
        state = sum(
            bytes_of(leaf.cache) for leaf in shown if isinstance(leaf, ArraysCache)
        )
    recorders.remove()
    return recorded, state


def slack(model: Any, prompt: list[int]) -> int:
    """Return what sliding caches hold beyond the rings that they stand for."""
    import mlx.core as mx
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    from mlx_speculation.caches import SlidingKVCache, leaves, with_slack

    def held(caches: list[Any], kind: type[Any]) -> int:
        for start in range(0, 600, 100):
            model(mx.array([prompt[start : start + 100]]), cache=caches)
            model(mx.array([prompt[:1]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        found = [leaf for _, leaf in leaves(caches) if isinstance(leaf, kind)]
        sizes: list[int] = [leaf.nbytes for leaf in found]
        return sum(sizes)

    native = held(make_prompt_cache(model), RotatingKVCache)
    return held(with_slack(make_prompt_cache(model)), SlidingKVCache) - native


def peak_after(steps: Iterator[Any]) -> int:
    """Return the peak of memory once the prefill is over, in bytes."""
    import mlx.core as mx

    for _ in islice(steps, SETTLED):
        pass
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in steps:
        pass
    mx.synchronize()
    return mx.get_peak_memory()


@app.command()
def main(
    target: Annotated[
        list[str] | None, typer.Option(help="By default dense, sliding and hybrid.")
    ] = None,
    context: Annotated[int, typer.Option(min=100, help="Tokens.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 200,
    draft_length: Annotated[int, typer.Option(min=1)] = 4,
    blas: BlasName = "auto",
) -> None:
    """Compare the peaks, and fail where one is above its bound."""
    chosen = use_blas(blas)
    report = [
        measure(name, context, rounds, draft_length)
        for name in target or ["dense", "sliding", "hybrid"]
    ]
    print(json.dumps({"blas": chosen.name, "results": report}))
    over = [row["target"] for row in report if row["peak"] > row["allowed"]]
    if over:
        raise SystemExit(f"above the bound: {', '.join(over)}")


if __name__ == "__main__":
    run(app)
