"""Peak memory of speculation over many rounds, beside plain decoding, in bytes.

The bound is 1.05 times the peak of mlx-lm's plain decoding of as many tokens, plus what
speculation is known to hold: the slack of sliding windows, what one round records for a
replay, one recurrent state, the draft's weights and caches, and k + 1 rows of logits.
The peak is measured after the prefill. The script fails if a peak is above its bound.

    python scripts/memory.py --target dense --target sliding --target hybrid
"""

import gc
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from bench import options as opt
from bench.prompts import bundled
from bench.report import reported
from mlx_speculation.cli import run

FLOAT32 = 4  # bytes
SETTLED = 20  # steps after which the prefill's memory is freed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def memory(
    context: typer.Context,
    target: opt.Targets = None,
    draft_model: opt.DraftModel = "draft",
    prompt: Annotated[int, typer.Option(min=600, help="Prompt tokens.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 200,
    draft_length: Annotated[int, typer.Option(min=1)] = 4,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Compare the peaks, and fail if one is above its bound."""
    with reported(context) as report:
        for name in target or ["dense"]:
            report.say(name)
            report.add(**measure(name, draft_model, prompt, rounds, draft_length))
    over = [row["target"] for row in report.rows if row["peak"] > row["allowed"]]
    if over:
        raise SystemExit(f"above the bound: {', '.join(over)}")


def measure(
    name: str, draft_model: str, prompt_tokens: int, rounds: int, length: int
) -> dict[str, Any]:
    """Run plain decoding and speculation on the same prompt; return bytes."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from bench.models import Bench
    from mlx_speculation import SpeculativeGenerator, load

    bench = Bench.of(name, draft_model)
    groups = bundled(None, 1 << 20).values()
    text = "\n\n".join(question.turns[0] for group in groups for question in group)
    prompt = bench.tokenizer.encode(text)
    prompt = (prompt * (1 + prompt_tokens // len(prompt)))[:prompt_tokens]
    most = SETTLED + rounds * (length + 1)
    plain = peak_after(generate_step(mx.array(prompt), bench.bare, max_tokens=most))
    recorded, state = recorded_and_state(bench.model, prompt, length + 1)
    parts = {"slack": slack(bench.model, prompt), "recorded": recorded, "state": state}
    gc.collect()
    before = mx.get_active_memory()
    draft, _ = load(bench.draft_folder)
    mx.eval(draft.parameters())
    parts["draft_weights"] = mx.get_active_memory() - before
    parts["draft_caches"] = cache_bytes(draft, prompt, most)
    parts["logits"] = (length + 1) * len(bench.tokenizer.get_vocab()) * FLOAT32
    stream = SpeculativeGenerator(
        bench.model, bench.tokenizer, draft=draft, draft_length=length
    ).stream(prompt, max_tokens=most, stop_tokens=())
    peak = peak_after(stream)
    assert stream.stats.rounds >= rounds
    allowed = round(1.05 * plain + sum(parts.values()))
    row = {"target": bench.name, "plain": plain, "peak": peak, "allowed": allowed}
    ratios = {"peak_x": peak / plain, "allowed_x": allowed / plain}
    return {**row, **ratios, "rounds": stream.stats.rounds, **parts}


def cache_bytes(draft: Any, prompt: list[int], more: int) -> int:
    """Return the bytes of a draft's caches at the end of a text."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_speculation.caches import leaves

    caches, half = make_prompt_cache(draft), len(prompt) // 2
    for part in (prompt[:half], prompt[half:], prompt[:more]):
        draft(mx.array([part]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return sum(int(leaf.nbytes) for _, leaf in leaves(caches))


def bytes_of(values: Any) -> int:
    """Count the bytes of all arrays in nested lists, dicts and dataclasses."""
    import mlx.core as mx
    import mlx.nn as nn

    if isinstance(values, mx.array):
        return values.nbytes
    if isinstance(values, nn.Module):
        return 0
    if isinstance(values, dict):
        values = list(values.values())
    elif is_dataclass(values) and not isinstance(values, type):
        values = [getattr(values, each.name) for each in fields(values)]
    is_list = isinstance(values, list | tuple)
    return sum(bytes_of(value) for value in values) if is_list else 0


def recorded_and_state(model: Any, prompt: list[int], rows: int) -> tuple[int, int]:
    """Return the bytes that one round records, and the bytes of a recurrent state."""
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
    """Return the bytes that sliding caches hold more than mlx-lm's rotating caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    from mlx_speculation.caches import SlidingKVCache, leaves, with_slack

    def kept(caches: list[Any], kind: type[Any]) -> int:
        for start in range(0, 600, 100):
            model(mx.array([prompt[start : start + 100]]), cache=caches)
            model(mx.array([prompt[:1]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        result = [leaf for _, leaf in leaves(caches) if isinstance(leaf, kind)]
        return sum(int(leaf.nbytes) for leaf in result)

    native = kept(make_prompt_cache(model), RotatingKVCache)
    return kept(with_slack(make_prompt_cache(model)), SlidingKVCache) - native


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


if __name__ == "__main__":
    run(app)
