"""Prometheus metrics. Metrics that vLLM also has are named as in vLLM."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from mlx_speculation.engine import Result

_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0),
)

# Full names, help texts and labels; methods of `Metrics` omit the prefix of a name.
_LEVELS = (
    ("vllm:num_requests_running", "Texts that are being generated."),
    (
        "vllm:num_requests_waiting",
        "Texts that are not generated yet: queued, or their prompt is being prepared "
        "or read.",
    ),
    ("mlx_speculation:prefix_cache_bytes", "Bytes in the prefix cache."),
    (
        "mlx_speculation:prefix_cache_restore_points",
        "Positions in the prefix cache where recurrent and sliding-window layers can "
        "resume.",
    ),
    (
        "mlx_speculation:prefix_cache_evictions",
        "Parts dropped from the prefix cache to make room.",
    ),
    ("mlx_speculation:active_memory_bytes", "Bytes of all mlx arrays."),
)
_COUNTS = (
    (
        "mlx_speculation:prompt_tokens_by_source",
        "Prompt tokens: reused from memory, reused from disk, or read.",
        "source",
    ),
    ("vllm:prompt_tokens", "Prompt tokens."),
    ("vllm:generation_tokens", "Generated tokens."),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("vllm:request_success", "Generated texts that ended.", "finished_reason"),
    (
        "mlx_speculation:requests_refused",
        "Requests and connections that got an error.",
        "status",
    ),
    ("mlx_speculation:requests_cancelled", "Requests whose client went away."),
    ("vllm:spec_decode_num_drafts", "Rounds with drafts."),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens."),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafted tokens by their place in the draft.",
        "position",
    ),
    ("mlx_speculation:drafter_faults", "Drafters that were disabled after a fault."),
    (
        "mlx_speculation:rows_alone",
        "Texts that could not be decoded together with others.",
        "reason",
    ),
)
_TIMES = (
    ("vllm:time_to_first_token_seconds", "Time from request to first token."),
    ("vllm:e2e_request_latency_seconds", "Time from request to last token."),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self._model, self._registry = model, CollectorRegistry()
        self._levels = self._made(Gauge, _LEVELS)
        self._counts = self._made(Counter, _COUNTS)
        self._times = self._made(partial(Histogram, buckets=_SECONDS), _TIMES)

    def _made(self, kind: Any, table: Iterable[tuple[str, ...]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, help, *labels in table:
            one = kind(name, help, ("model_name", *labels), registry=self._registry)
            made[name.partition(":")[2]] = one if labels else one.labels(self._model)
        return made

    def add(self, name: str, *label: str | int, count: int = 1) -> None:
        """Add to a counter; `label` is the value of its label, if it has one."""
        counter = self._counts[name]
        (counter.labels(self._model, *label) if label else counter).inc(count)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """Let a gauge call `read` for its value each time the metrics are served."""
        self._levels[name].set_function(read)

    def began(self, seconds: float) -> None:
        """Record the time to a first token."""
        self._times["time_to_first_token_seconds"].observe(seconds)

    def ended(self, result: Result, prompt: int, seconds: float) -> None:
        """Count a row that has ended, for any reason, and the tokens of its prompt."""
        stats = result.stats
        by_source, by_place = "prompt_tokens_by_source", enumerate(stats.reached)
        counts: dict[tuple[Any, ...], int] = {
            ("prompt_tokens",): prompt,
            (by_source, "memory"): stats.reused - stats.reused_from_disk,
            (by_source, "disk"): stats.reused_from_disk,
            (by_source, "read"): max(0, prompt - stats.reused),
            ("generation_tokens",): len(result.tokens),
            ("prefix_cache_queries",): prompt,
            ("prefix_cache_hits",): stats.reused,
            ("spec_decode_num_drafts",): stats.drafts,
            ("spec_decode_num_draft_tokens",): stats.drafted,
            ("spec_decode_num_accepted_tokens",): stats.accepted,
            ("drafter_faults",): len(stats.drafter_faults),
            **{("spec_decode_num_accepted_tokens_per_pos", i): n for i, n in by_place},
        }
        for names, count in counts.items():
            self.add(*names, count=count)
        if result.finish_reason in ("stop", "length"):
            self.add("request_success", result.finish_reason)
            self._times["e2e_request_latency_seconds"].observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
