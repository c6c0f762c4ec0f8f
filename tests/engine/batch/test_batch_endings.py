"""A batch stays usable if joining, taking tokens or closing fails."""

from typing import Any

import pytest

from mlx_speculation import BatchGenerator, PrefixCache, Sampling, SpeculationError
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.engine.detokenizer import ChunkQueue
from mlx_speculation.engine.result import Chunk
from mlx_speculation.models import BatchLane
from support.drafters.batches import Case, bench

CASES = [Case(6, Sampling(), 18), Case(17, Sampling(temperature=0.8, seed=1), 18)]


def finish(batch: BatchGenerator) -> None:
    while batch.waiting or batch.running:
        batch.next()


@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
@pytest.mark.parametrize("layer", [1, 2])
def test_rows_that_cannot_join_leave_those_that_are_there_as_they_were(
    kind: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain, left = bench("llama"), RaggedKVCache.extend, [layer]

    def extend(self: RaggedKVCache, other: RaggedKVCache) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        plain(self, other)

    with BatchGenerator(made.generator(kind)) as batch:
        rows = {made.insert(batch, CASES[0]): CASES[0]}
        batch.next()
        monkeypatch.setattr(RaggedKVCache, "extend", extend)
        late = made.insert(batch, CASES[1])
        rows[late] = CASES[1]
        finish(batch)
        assert left[0] <= 0
        alone = batch.why_alone(late)
        assert alone is not None
        assert "no room" in alone
        for uid, case in rows.items():
            assert len(batch.result(uid).tokens) == case.max_tokens
            made.check(case, batch.result(uid).tokens)


def test_closing_ends_every_row_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench("llama")
    generator = made.generator("none", prefix_cache=PrefixCache(1 << 24))
    batch = BatchGenerator(generator)
    uids = [made.insert(batch, case) for case in (*CASES, CASES[0])]
    batch.next()
    batch.next()

    def extract(self: BatchLane, row: int) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(BatchLane, "extract", extract)
    with pytest.raises(MemoryError, match="no room"):
        batch.close()
    assert batch.running == batch.waiting == ()
    assert batch.memory == 0
    for uid, case in zip(uids, (*CASES, CASES[0]), strict=True):
        made.check(case, batch.result(uid).tokens)
    batch.close()


def test_a_row_that_cannot_take_its_tokens_ends_and_the_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, plain = bench("llama"), ChunkQueue.take
    with BatchGenerator(made.generator("model")) as batch:
        first, second = (made.insert(batch, case) for case in CASES)
        batch.next()
        failing = batch._rows[first].generation.chunks

        def take(self: ChunkQueue) -> list[Chunk]:
            if self is failing:
                monkeypatch.setattr(ChunkQueue, "take", plain)
                raise KeyboardInterrupt
            return plain(self)

        monkeypatch.setattr(ChunkQueue, "take", take)
        with pytest.raises(KeyboardInterrupt):
            batch.next()
        finish(batch)
        assert isinstance(batch.error(first), SpeculationError)
        made.check(CASES[0], batch.result(first).tokens)
        assert len(batch.result(second).tokens) == CASES[1].max_tokens
        made.check(CASES[1], batch.result(second).tokens)
