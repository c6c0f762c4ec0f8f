"""Prometheus metrics. Those that vLLM also has are named as in vLLM.

The extra "serve" installs prometheus-client, which is imported when a server is made.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_speculation.errors import MissingLibraryError

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache
    from mlx_speculation.engine import Result

_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0),
)


# Three tables, one for each kind of metric: for this module's short name of a metric,
# its full name, help text and labels.
_LEVELS = {
    "running": ("vllm:num_requests_running", "Rows that are decoded."),
    "waiting": ("vllm:num_requests_waiting", "Requests without a row."),
    "cached": ("mlx_speculation:prefix_cache_bytes", "Bytes in the prefix cache."),
    "points": (
        "mlx_speculation:prefix_cache_restore_points",
        "Positions where recurrent and sliding-window layers can resume.",
    ),
    "evictions": (
        "mlx_speculation:prefix_cache_evictions",
        "Parts dropped from the prefix cache to make room.",
    ),
    "active": ("mlx_speculation:active_memory_bytes", "Bytes of all mlx arrays."),
}
_COUNTS = {
    "sources": (
        "mlx_speculation:prompt_tokens_by_source",
        "Tokens of prompts: reused from memory, from disk, or read.",
        "source",
    ),
    "prompts": ("vllm:prompt_tokens", "Tokens of prompts."),
    "generated": ("vllm:generation_tokens", "Tokens of texts."),
    "queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up."),
    "hits": ("vllm:prefix_cache_hits", "Prompt tokens not read again."),
    "ended": ("vllm:request_success", "Texts that have ended.", "finished_reason"),
    "refused": (
        "mlx_speculation:requests_refused",
        "Answers that were errors.",
        "status",
    ),
    "cancelled": ("mlx_speculation:requests_cancelled", "Clients that went away."),
    "drafts": ("vllm:spec_decode_num_drafts", "Rounds with drafts."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Drafted tokens."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens."),
    "positions": (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafted tokens by their place in the draft.",
        "position",
    ),
    "faults": (
        "mlx_speculation:drafter_faults",
        "Drafters that were disabled after a fault.",
    ),
    "alone": (
        "mlx_speculation:rows_alone",
        "Rows that could not be decoded together with others.",
        "reason",
    ),
}
_TIMES = {
    "first": (
        "vllm:time_to_first_token_seconds",
        "From the request to the first token.",
    ),
    "whole": (
        "vllm:e2e_request_latency_seconds",
        "From the request to the last token.",
    ),
}


class Metrics:
    """The metrics of one server, in a registry of their own.

    Raises:
        MissingLibraryError: prometheus-client is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingLibraryError(
                "The server counts with prometheus-client, which is not installed. "
                "Install it with: pip install 'mlx-speculation[serve]'"
            ) from error
        self._library, self._model = prometheus_client, model
        self._registry = prometheus_client.CollectorRegistry()
        self._levels = self._made(prometheus_client.Gauge, _LEVELS)
        self._counts = self._made(prometheus_client.Counter, _COUNTS)
        histogram = partial(prometheus_client.Histogram, buckets=_SECONDS)
        self._times = self._made(histogram, _TIMES)

    def _made(self, kind: Any, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, (name, help, *labels) in table.items():
            one = kind(name, help, ("model_name", *labels), registry=self._registry)
            made[key] = one if labels else one.labels(self._model)
        return made

    def level(self, **levels: int) -> None:
        """Set gauges, by their short names."""
        for name, value in levels.items():
            self._levels[name].set(value)

    def watch(self, prefixes: "PrefixCache") -> None:
        """Let gauges read a prefix cache each time the metrics are served."""
        self._levels["points"].set_function(lambda: prefixes.restore_points)
        self._levels["evictions"].set_function(lambda: prefixes.evictions)

    def began(self, seconds: float) -> None:
        """Record the time to a first token."""
        self._times["first"].observe(seconds)

    def ended(self, result: "Result", prompt: int, seconds: float) -> None:
        """Count a row that has ended, for any reason.

        Args:
            result: the result of the row.
            prompt: the number of tokens of its prompt.
            seconds: the time from the request to the last token.
        """
        stats, disk = result.stats, result.stats.reused_from_disk
        self._add("prompts", prompt)
        self._add("generated", len(result.tokens))
        self._add("queries", prompt)
        self._add("hits", stats.reused)
        self._add("sources", stats.reused - disk, "memory")
        self._add("sources", disk, "disk")
        self._add("sources", max(0, prompt - stats.reused), "read")
        self._add("drafts", stats.drafts)
        self._add("drafted", stats.drafted)
        self._add("accepted", stats.accepted)
        for position, accepted in enumerate(stats.reached):
            self._add("positions", accepted, position)
        self._add("faults", len(stats.drafter_faults))
        if result.finish_reason in ("stop", "length"):
            self._add("ended", 1, result.finish_reason)
            self._times["whole"].observe(seconds)

    def alone(self, reason: str) -> None:
        """Count a row that is not decoded together with others."""
        self._add("alone", 1, reason)

    def refused(self, status: int) -> None:
        """Count an answer that is an error."""
        self._add("refused", 1, status)

    def cancelled(self) -> None:
        """Count a request whose client has disconnected."""
        self._add("cancelled", 1)

    def page(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        library = self._library
        return library.generate_latest(self._registry), library.CONTENT_TYPE_LATEST

    def _add(self, name: str, count: int, *label: str | int) -> None:
        counter = self._counts[name]
        (counter.labels(self._model, *label) if label else counter).inc(count)
