"""Choice of tokens from logits: equal rows, positions and seed give equal tokens.

A chooser belongs to one request. Choosing a token changes no state but that of the
user's processors.
"""

from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.logits.filters import apply_filters
from mlx_speculation.samplers.logits.processors import Processors
from mlx_speculation.samplers.noise.gumbel import (
    CHOICE,
    GumbelNoise,
    position_keys,
    stream_key,
)
from mlx_speculation.samplers.noise.round_keys import XTC, coins
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.sampling import Sampling
from mlx_speculation.samplers.user_sampler import called_on_rows


class Chooser:
    """Chooses tokens for one request, for the target and for any drafter alike.

    The methods take `logits` [rows, vocab]; `processed`, the result of the method
    `processed` for the same logits; and `rows`, the tokens before each row.
    """

    def __init__(
        self,
        sampling: Sampling,  # the request's options, with a seed
        width: int,  # the number of token ids, and of values in every draw of noise
        *,
        # Ids from `limit` on are never chosen: the target has no logits for them.
        # None: `width`
        limit: int | None = None,
        # Ids below `limit` that do not exist, int32 [n], or None
        missing: mx.array | None = None,
    ) -> None:
        if sampling.seed is None:
            raise InvalidRequestError("The seed is None. Call sampling.with_seed().")
        self.sampling = sampling
        self.greedy = sampling.greedy
        self._rows: int | None = None
        self.processors = Processors(sampling, width if limit is None else limit)
        self.width = width
        self.limit = width if limit is None else min(limit, width)
        self._exists: mx.array | None = None
        if missing is not None:
            ids = mx.arange(width)[:, None]
            self._exists = (ids != missing[None]).all(axis=-1)  # [width]
        self._noise = GumbelNoise(stream_key(sampling.seed, CHOICE), width)
        self._xtc = stream_key(sampling.seed, XTC)

    def for_drafts(self) -> "Chooser":
        """Return a chooser with the draft temperature and the same noise."""
        if self.sampling.for_drafts is self.sampling:
            return self
        other = copy(self)  # shares the noise object, so that no noise is drawn twice
        other.sampling = self.sampling.for_drafts
        other.greedy = other.sampling.greedy
        return other

    def in_fixed_shape(self, rows: int) -> "Chooser":
        """Return a chooser that pads to `rows` rows before it filters."""
        other = copy(self)
        other._rows = rows
        return other

    def filled_up(self, rows: mx.array) -> mx.array:
        """Pad [n, ...] to the rows of `in_fixed_shape`, by repeating the last row."""
        missing = 0 if self._rows is None else self._rows - len(rows)
        if missing <= 0:
            return rows
        more = mx.broadcast_to(rows[-1:], (missing, *rows.shape[1:]))
        return mx.concatenate([rows, more])

    def choose(self, logits: mx.array, rows: Rows) -> mx.array:
        """Choose one token per row, uint32 [rows]. Needs `processors.parallel`."""
        return self.pick(self.processed(logits, rows), rows)

    def pick(self, processed: mx.array, rows: Rows) -> mx.array:
        """Return the ids with the largest scores, uint32 [rows]."""
        if self.sampling.sampler is not None:
            return called_on_rows(self.sampling.sampler, processed)
        if self.greedy:
            return mx.argmax(processed, axis=-1)
        return mx.argmax(self.scores(processed, rows), axis=-1)

    def scores(self, processed: mx.array, rows: Rows) -> mx.array:
        """Return scores [rows, ids], which `pick` maximizes; float32 unless greedy."""
        if self.greedy:
            return processed
        log_probs = self.log_probs(processed, rows)
        noise = self._noise.rows(rows.positions)
        if noise.shape[-1] > log_probs.shape[-1]:
            noise = noise[:, : log_probs.shape[-1]]
        return log_probs + noise

    def log_probs(self, processed: mx.array, rows: Rows) -> mx.array:
        """Return the filtered, tempered log-probabilities, float32, unnormalized."""
        thrown = self.coins(rows.positions)
        if self._rows is None or not self.sampling.filters:
            return tempered(processed, self.sampling, thrown)
        thrown = None if thrown is None else self.filled_up(thrown)
        result = tempered(self.filled_up(processed), self.sampling, thrown)
        return result[: len(processed)]

    def coins(self, positions: Sequence[int]) -> mx.array | None:
        """Return XTC's coins of these positions, float32 [rows]; None: XTC is off."""
        if self.sampling.xtc_probability == 0:
            return None
        return coins(position_keys(self._xtc, mx.array(list(positions))))

    def noise(self, positions: Sequence[int]) -> mx.array:
        """Return the noise of these positions, float32 [rows, width]."""
        return self._noise.rows(positions)

    def processed(
        self, logits: mx.array, rows: Rows, *, for_draft: bool = False
    ) -> mx.array:
        """Return the logits after the request's processors, with -inf for barred ids.

        The result is [rows, ids], with `limit` ids, or fewer if the logits have fewer.
        Needs `processors.parallel`, except with `for_draft`: serial processors are then
        skipped, and no processor's state changes.
        """
        if self.processors.active:
            processors = self.processors
            logits = (processors.for_draft if for_draft else processors.apply)(
                logits, rows
            )
        return self.usable(logits, rows)

    def usable(self, logits: mx.array, rows: Rows) -> mx.array:
        """Return processed logits with -inf for ids that must not be chosen."""
        if logits.shape[-1] > self.limit:
            logits = logits[:, : self.limit]
        for mask in (self._exists, rows.allowed):
            if mask is not None:
                nothing = mx.array(-mx.inf, logits.dtype)
                logits = mx.where(mask[..., : logits.shape[-1]], logits, nothing)
        return logits


def tempered(
    processed: mx.array, sampling: Sampling, thrown: mx.array | None
) -> mx.array:
    """Return filtered, tempered log-probabilities, float32, unnormalized.

    `processed` are logits [rows, ids] after processors, and `thrown` XTC's coins,
    float32 [rows], or None if XTC is off.
    """
    logits = processed.astype(mx.float32)
    if sampling.filters:
        logits = apply_filters(logits, sampling, thrown)
    if sampling.temperature == 1:
        return logits
    return logits * (1 / sampling.temperature)
