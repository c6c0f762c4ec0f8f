"""Peak memory of speculation over many rounds, beside plain decoding, in bytes.

The bound is 1.05 times the peak of mlx-lm's plain decoding of the same number of
tokens, plus the slack of sliding windows, k + 1 rows of logits, and three parts of
`Result.memory`: `draft_weights`, `draft_caches` and `rounds`. The peak is measured
after the prefill. The script fails if a peak is above its bound.

    python scripts/memory.py --target dense --target sliding --target hybrid
"""

import gc
from collections.abc import Iterator
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
        raise SystemExit(f"peak memory above the bound: {', '.join(over)}")


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
    stream = SpeculativeGenerator(
        bench.model,
        bench.tokenizer,
        draft=load(bench.draft_folder)[0],
        draft_length=length,
    ).stream(prompt, max_tokens=most, stop_tokens=())
    peak = peak_after(stream)
    assert stream.stats.rounds >= rounds
    bytes_of = stream.result.memory
    parts = {
        "slack": slack(bench.model, prompt),
        "round_bytes": bytes_of.rounds,
        "draft_weights": bytes_of.draft_weights,
        "draft_caches": bytes_of.draft_caches,
        "logits": (length + 1) * len(bench.tokenizer.get_vocab()) * FLOAT32,
    }
    allowed = round(1.05 * plain + sum(parts.values()))
    row = {"target": bench.name, "plain": plain, "peak": peak, "allowed": allowed}
    ratios = {"peak_x": peak / plain, "allowed_x": allowed / plain}
    return {**row, **ratios, "rounds": stream.stats.rounds, **parts}


def slack(model: Any, prompt: list[int]) -> int:
    """Return how many more bytes sliding caches have than mlx-lm's rotating caches."""
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
