"""Metrics agree with the counts of generations and of the prefix cache."""

from functools import partial
from pathlib import Path

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.server.metrics import Metrics
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.processes.servers import nearly

PROMPT = [(7 * i * i + 3) % 251 for i in range(120)]
SOURCES = ("memory", "disk", "read")


def values(metrics: Metrics) -> dict[str, float]:
    """Return the values of a metrics page by name and labels except model_name."""
    lines = metrics.page()[0].decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {
        name.replace('model_name="model"', "").replace("{,", "{"): float(value)
        for name, value in pairs
    }


def by_source(metrics: Metrics) -> list[float]:
    name = 'mlx_speculation:prompt_tokens_by_source_total{source="%s"}'
    sums = values(metrics)
    return [sums[name % source] for source in SOURCES]


def generator(prefixes: PrefixCache) -> SpeculativeGenerator:
    """Return a generator of a model with recurrent layers."""
    model = build("qwen3_5")
    return SpeculativeGenerator(model, byte_tokenizer(), prefix_cache=prefixes)


def play(metrics: Metrics, prefixes: PrefixCache, prompts: list[list[int]]) -> None:
    ours = generator(prefixes)
    for prompt in prompts:
        metrics.ended(ours.generate(prompt, max_tokens=2), len(prompt), 0.5)
    prefixes.flush()


def test_tokens_of_prompts_are_counted_by_where_they_come_from(tmp_path: Path) -> None:
    metrics = Metrics("model")
    folder, size = tmp_path / "own", len(PROMPT)
    play(metrics, PrefixCache(1 << 30, every=16, folder=folder), [PROMPT, PROMPT])
    assert by_source(metrics) == [size - 1, 0, size + 1]
    later = PrefixCache(1 << 30, every=16, folder=folder)
    play(metrics, later, [[*PROMPT, 5], PROMPT[:100], [9, 9, 9]])
    counted = by_source(metrics)
    assert counted[:2] == [size - 1, size - 1 + 96]  # 96: a restore point from a file
    assert sum(counted) == 3 * size + 104
    sums = values(metrics)
    assert sums["vllm:prompt_tokens_total{}"] == sum(counted)
    assert sums["vllm:prefix_cache_queries_total{}"] == sum(counted)
    assert sums["vllm:prefix_cache_hits_total{}"] == sum(counted[:2])


def test_a_text_is_counted_under_the_names_of_vllm() -> None:
    metrics, model = Metrics("model"), build("llama")
    draft = nearly(model, build("llama"), 0.03, 1)
    ours = SpeculativeGenerator(model, byte_tokenizer(), draft=draft, draft_length=3)
    result = ours.generate([1, 2, 3, 4] * 9, max_tokens=16)
    metrics.began(0.1)
    metrics.ended(result, 36, 0.5)
    stats, sums = result.stats, values(metrics)
    assert stats.drafted > stats.accepted > 0
    positions = [sums[name] for name in sums if "_per_pos_total" in name]
    assert positions == stats.reached
    expected = {
        "prompt_tokens_total{}": 36,
        "generation_tokens_total{}": 16,
        "spec_decode_num_drafts_total{}": stats.drafts,
        "spec_decode_num_draft_tokens_total{}": stats.drafted,
        "spec_decode_num_accepted_tokens_total{}": stats.accepted,
        'request_success_total{finished_reason="length",}': 1,
        "time_to_first_token_seconds_count{}": 1,
        "e2e_request_latency_seconds_count{}": 1,
    }
    assert {name: sums[f"vllm:{name}"] for name in expected} == expected


def test_restore_points_and_evictions_are_those_of_the_cache() -> None:
    metrics, prefixes = Metrics("model"), PrefixCache(300_000, every=16)
    for name in ("restore_points", "evictions"):
        metrics.watch(f"prefix_cache_{name}", partial(getattr, prefixes, name))
    points = "mlx_speculation:prefix_cache_restore_points{}"
    evictions = "mlx_speculation:prefix_cache_evictions{}"
    assert (values(metrics)[points], values(metrics)[evictions]) == (0, 0)
    ours, seen = generator(prefixes), []
    for number in range(6):
        ours.generate([number, *PROMPT], max_tokens=2)
        sums = values(metrics)
        nodes = list(prefixes._tree.nodes())
        assert sums[points] == sum(0 in node.points for node in nodes) > 0
        assert sums[evictions] == prefixes.evictions
        seen.append(prefixes.evictions)
    assert seen[0] == 0 < seen[-1]
    assert seen == sorted(seen)
