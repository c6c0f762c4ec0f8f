"""From logits to tokens: the same rows, positions and seed give the same tokens.

Greedy is the zero-temperature case of the same code. A chooser holds what belongs to
one request; it has no state that a token could change, so rejected rows leave no
trace.
"""

from copy import copy

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.filters import apply_filters
from mlx_speculation.samplers.noise import CHOICE, GumbelNoise, stream_key
from mlx_speculation.samplers.rows import Rows
from mlx_speculation.samplers.sampling import Sampling


class Chooser:
    """Chooses tokens for one request, for the target and for any drafter alike.

    Args:
        sampling: the request's options, with a seed.
        width: the number of token ids, and of values in every draw of noise.
        limit: ids from here on are never chosen, because the target has no row for
            them; `width` when omitted. Logits may be wider or narrower.
        missing: ids below `limit` that do not exist, int32 [n], or None.
    """

    def __init__(
        self,
        sampling: Sampling,
        width: int,
        *,
        limit: int | None = None,
        missing: mx.array | None = None,
    ) -> None:
        if sampling.seed is None:
            raise InvalidRequestError("The seed is None. Call sampling.with_seed().")
        self.sampling = sampling
        self._width = width
        self._limit = width if limit is None else min(limit, width)
        self._exists: mx.array | None = None
        if missing is not None:
            ids = mx.arange(width)[:, None]
            self._exists = (ids != missing[None]).all(axis=-1)  # [width]
        self._noise = GumbelNoise(stream_key(sampling.seed, CHOICE), width)

    def for_drafts(self) -> "Chooser":
        """Return what chooses for drafts: with their temperature, and the same noise.

        The noise is shared as an object, so that its blocks are drawn once.
        """
        if self.sampling.draft_temperature is None:
            return self
        other = copy(self)
        other.sampling = self.sampling.for_drafts
        return other

    @property
    def width(self) -> int:
        """The number of token ids, and of values in every draw of noise."""
        return self._width

    @property
    def limit(self) -> int:
        """Ids from here on are never chosen."""
        return self._limit

    def choose(self, logits: mx.array, rows: Rows) -> mx.array:
        """Choose one token per row.

        Args:
            logits: [rows, vocab]; columns at and past `limit` are ignored.
            rows: what precedes each row.

        Returns:
            uint32 [rows].
        """
        return mx.argmax(self.scores(self.processed(logits, rows), rows), axis=-1)

    def scores(self, processed: mx.array, rows: Rows) -> mx.array:
        """Return what the choice maximizes, [rows, ids]; float32 unless greedy.

        Args:
            processed: what `processed` returned for these rows.
            rows: what precedes each row.
        """
        if self.sampling.greedy:
            return processed
        log_probs = self.log_probs(processed)
        noise = self._noise.rows(rows.positions)
        if noise.shape[-1] > log_probs.shape[-1]:
            noise = noise[:, : log_probs.shape[-1]]
        return log_probs + noise

    def log_probs(self, processed: mx.array) -> mx.array:
        """Return the filtered, tempered log-probabilities, float32, unnormalized."""
        logits = processed.astype(mx.float32)
        if self.sampling.filters:  # they compare with probabilities
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            logits = apply_filters(logits, self.sampling)
        if self.sampling.temperature == 1:
            return logits
        return logits * (1 / self.sampling.temperature)

    def processed(self, logits: mx.array, rows: Rows) -> mx.array:
        """Return logits as the request has them: ids that may not come are -inf.

        Args:
            logits: [rows, vocab].
            rows: what precedes each row.

        Returns:
            [rows, ids], `limit` of them, or fewer where the logits have fewer.
        """
        if logits.shape[-1] > self._limit:
            logits = logits[:, : self._limit]
        for mask in (self._exists, rows.allowed):
            if mask is not None:
                nothing = mx.array(-mx.inf, logits.dtype)
                logits = mx.where(mask[..., : logits.shape[-1]], logits, nothing)
        return logits
