"""Prometheus metrics, under vLLM's names if it has one.

prometheus-client is the extra "serve", and is imported when a server is made.
"""

from collections.abc import Callable
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


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingLibraryError(
            "The server counts with prometheus-client, which is not installed. "
            "Install it with: pip install 'mlx-speculation[serve]'"
        ) from error
    return prometheus_client


class Metrics:
    """The counts of one server, in a registry of their own.

    Raises:
        MissingLibraryError: prometheus-client is not installed.
    """

    def __init__(self, model: str) -> None:
        prometheus = _prometheus()
        self._library, self._registry = prometheus, prometheus.CollectorRegistry()
        self._model = model

        def made(kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
            names = ("model_name", *labels)
            one = kind(name, help, names, registry=self._registry, **more)
            return one if labels else one.labels(model)

        count = partial(made, prometheus.Counter)
        gauge = partial(made, prometheus.Gauge)
        histogram = partial(made, prometheus.Histogram, buckets=_SECONDS)
        self._add_levels(gauge)
        self._add_counts(count)
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From the request to the first token."
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From the request to the last token."
        )

    def _add_levels(self, gauge: Callable[..., Any]) -> None:
        self._running = gauge("vllm:num_requests_running", "Rows that are decoded.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests without a row.")
        self._cached = gauge(
            "mlx_speculation:prefix_cache_bytes", "Of the prefix cache."
        )
        self._points = gauge(
            "mlx_speculation:prefix_cache_restore_points",
            "Places where layers with states can be resumed.",
        )
        self._evictions = gauge(
            "mlx_speculation:prefix_cache_evictions",
            "Parts that made room in the prefix cache so far.",
        )
        self._active = gauge(
            "mlx_speculation:active_memory_bytes", "Of all mlx arrays."
        )

    def _add_counts(self, count: Callable[..., Any]) -> None:
        self._sources = count(
            "mlx_speculation:prompt_tokens_by_source",
            "Tokens of prompts: reused from memory, from disk, or read.",
            "source",
        )
        self._prompts = count("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = count("vllm:generation_tokens", "Tokens of texts.")
        self._queries = count("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = count("vllm:prefix_cache_hits", "Prompt tokens not read again.")
        self._ended = count(
            "vllm:request_success", "Texts that have ended.", "finished_reason"
        )
        self._refused = count(
            "mlx_speculation:requests_refused", "Answers that were errors.", "status"
        )
        self._cancelled = count(
            "mlx_speculation:requests_cancelled", "Clients that went away."
        )
        self._drafts = count("vllm:spec_decode_num_drafts", "Rounds with drafts.")
        self._drafted = count("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = count(
            "vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens."
        )
        self._positions = count(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their place in the draft.",
            "position",
        )
        self._faults = count(
            "mlx_speculation:drafter_faults",
            "Drafters that were disabled after a fault.",
        )
        self._alone = count(
            "mlx_speculation:rows_alone",
            "Rows that could not be decoded together with others.",
            "reason",
        )

    def level(self, *, running: int, waiting: int, cached: int, active: int) -> None:
        """Note how many requests and bytes there are."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._cached.set(cached)
        self._active.set(active)

    def watch(self, prefixes: "PrefixCache") -> None:
        """Show what a prefix cache says of itself whenever the page is made."""
        self._points.set_function(lambda: prefixes.restore_points)
        self._evictions.set_function(lambda: prefixes.evictions)

    def began(self, seconds: float) -> None:
        """Count a first token."""
        self._first.observe(seconds)

    def ended(self, result: "Result", prompt: int, seconds: float) -> None:
        """Count a row that has ended, whatever has ended it."""
        stats = result.stats
        self._prompts.inc(prompt)
        self._generated.inc(len(result.tokens))
        self._queries.inc(prompt)
        self._hits.inc(stats.reused)
        disk = stats.reused_from_disk
        for source, tokens in (
            ("memory", stats.reused - disk),
            ("disk", disk),
            ("read", max(0, prompt - stats.reused)),
        ):
            self._sources.labels(self._model, source).inc(tokens)
        self._drafts.inc(stats.drafts)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, accepted in enumerate(stats.reached):
            self._positions.labels(self._model, position).inc(accepted)
        self._faults.inc(len(stats.drafter_faults))
        if result.finish_reason in ("stop", "length"):
            self._ended.labels(self._model, result.finish_reason).inc()
            self._whole.observe(seconds)

    def alone(self, reason: str) -> None:
        """Count a row that is not decoded together with others."""
        self._alone.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """Count an answer that is an error."""
        self._refused.labels(self._model, status).inc()

    def cancelled(self) -> None:
        """Count a client that went away."""
        self._cancelled.inc()

    def page(self) -> tuple[bytes, str]:
        """Return everything in Prometheus' text form, and the type of that."""
        library = self._library
        return library.generate_latest(self._registry), library.CONTENT_TYPE_LATEST
