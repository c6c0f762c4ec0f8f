"""A cache kind of your own, and its journal. The protocol is `caches.Journal`."""

from typing import Any

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.caches.registry import JOURNALS

# isort: split
import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class WritesCache:
    """Keys and values as a list of writes, joined when they are read."""

    def __init__(self) -> None:
        self.writes: list[tuple[mx.array, mx.array]] = []
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.writes.append((keys, values))
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        return tuple(
            mx.concatenate(list(part), axis=2)
            for part in zip(*self.writes, strict=True)
        )

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"

    @property
    def state(self) -> Any:
        return self.writes


class WritesJournal:
    """Journal of a `WritesCache`: drops writes, and cuts the last one that stays."""

    live = True  # the model writes to the cache, not to a copy
    rows = 1  # the number of sequences in the batch

    def __init__(self, cache: WritesCache) -> None:
        self._cache = cache
        self._before, self._start = list(cache.writes), cache.offset

    @property
    def presented(self) -> WritesCache:
        return self._cache

    @property
    def written(self) -> int:
        return self._cache.offset - self._start

    def prepare(self, keep: int) -> None:
        """Do nothing: a commit cannot fail."""

    def commit(self, keep: int) -> None:
        kept, left = list(self._before), keep
        for keys, values in self._cache.writes[len(self._before) :]:
            count = min(left, keys.shape[2])
            if count:
                kept.append((keys[..., :count, :], values[..., :count, :]))
            left -= count
        self._cache.writes, self._cache.offset = kept, self._start + keep

    def rollback(self) -> None:
        self._cache.writes, self._cache.offset = list(self._before), self._start


JOURNALS[WritesCache] = lambda cache, whole: WritesJournal(cache)

generator = SpeculativeGenerator.from_pretrained(
    demo_models()["dense"], draft=demo_models()["draft"], draft_length=4
)
caches = [WritesCache() for _ in generator.model.layers]
result = generator.generate("import os\n", max_tokens=24, prompt_cache=caches)
plain = generator.generate("import os\n", max_tokens=24, draft_length=0)

assert result.tokens == plain.tokens
assert {cache.offset for cache in caches} == {len(result.cached_tokens)}
print(f"{result.stats.accepted} of {result.stats.drafted} drafted tokens accepted")
