"""Gemma 4 assistants and chained MTP heads draft for all rows in one forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import BatchGenerator, Sampling, SpeculativeGenerator
from mlx_speculation.caches import KVQuantization
from mlx_speculation.engine import AssistantDraft
from mlx_speculation.engine.drafters import mtp
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.shared_drafters import shared_head
from mlx_speculation.engine.shared_drafters.shared import SharedDrafter
from mlx_speculation.models import BatchLane
from mlx_speculation.models.gemma_assistant import Assistant, SharedKv
from mlx_speculation.models.mtp import BatchHeadCache, Mtp, rounds
from support.covering import covering
from support.drafters.batch_heads import generator_of, mtp_on
from support.drafters.batches import three_rounds_of_eight
from support.drafters.scripted_draft_lengths import Planned
from support.identity import prompt_of
from support.models.assistant_checkpoints import HEADS, TARGETS, make

KINDS = ("chained", "assistant")


def generator(
    kind: str, name: str = "shared", head: str = "dense", **options: Any
) -> SpeculativeGenerator:
    if kind == "chained":
        return generator_of(*mtp_on("step3p5"), **options)
    made = make(name, head)
    draft = AssistantDraft(made.target, made.assistant)
    return generator_of(made.target, draft, **options)


@contextmanager
def forwards(kind: str) -> Iterator[list[int]]:
    """Record the number of rows of each forward that drafts a token."""
    rows: list[int] = []
    owner: Any = Mtp if kind == "chained" else Assistant
    names = ("rows", "step", "ragged") if kind == "chained" else ("run",)

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, hidden: Any, *args: Any) -> Any:
            rows.append(len(hidden))
            return plain(self, hidden, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, noting(getattr(owner, name)))
        yield rows


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_eight_rows_are_as_many_forwards_of_the_drafter_as_one(kind: str) -> None:
    made = generator(kind)
    with BatchGenerator(made) as batch, forwards(kind) as rows:
        three_rounds_of_eight(batch, rows)
    assert rows == [8] * 9  # three rounds, each of three drafted tokens a row
    with forwards(kind) as alone:
        result = made.generate(prompt_of(9), max_tokens=40, stop_tokens=())
    assert len(alone) == result.stats.drafted


class Asked(NamedTuple):
    """A request; it joins in round `joins`, and leaves `leaves` rounds later."""

    prompt: int
    lengths: list[int]
    seed: int | None = None
    joins: int = 0
    leaves: int | None = None

    def options(self) -> dict[str, Any]:
        sampled = Sampling(temperature=0.8, seed=self.seed or 0)
        return {
            "sampling": Sampling() if self.seed is None else sampled,
            "draft_length": Planned(self.lengths),
            "max_tokens": 22,
            "stop_tokens": (),
            "logprobs": 2,
        }


# Prompts are longer and shorter than a window. Some rows draft fewer tokens than a
# chain has layers. Heads lag behind their targets by different numbers of tokens.
ASKED = (
    Asked(40, [3, 0, 0, 2]),
    Asked(2, [1, 1, 0, 3], seed=3, joins=1),
    Asked(17, [0, 0, 0, 0, 0, 3], seed=4, leaves=5),
    Asked(9, [3], joins=4),
    Asked(23, [2, 0, 3], seed=5, joins=6, leaves=5),
    Asked(5, [1], joins=7),
    Asked(1, [3], joins=5),
)
Drafts = dict[tuple[int, ...], list[int]]


def note(patch: pytest.MonkeyPatch, by_text: Drafts) -> None:
    def add(sequence: Any, draft: Any) -> None:
        if draft.length:
            tokens: Any = draft.tokens.tolist()
            by_text[tuple(sequence.tokens)] = tokens

    plain, shared = MtpDrafter.propose, SharedDrafter.propose

    def propose(self: Any, sequence: Any, *args: Any) -> Any:
        draft = plain(self, sequence, *args)
        add(sequence, draft)
        return draft

    def together(self: Any, requests: Any, limits: Any) -> Any:
        drafts, failed = shared(self, requests, limits)
        for request, draft in zip(requests, drafts, strict=True):
            add(request.sequence, draft)
        return drafts, failed

    patch.setattr(MtpDrafter, "propose", propose)
    patch.setattr(SharedDrafter, "propose", together)


Keys = dict[tuple[int, int], Any]


def hold(by_place: Keys, layers: Any, state: Any) -> None:
    """Record the keys of a head by layer and position, for committed tokens only."""
    for layer, (caches, end) in enumerate(zip(layers, state.ends, strict=True)):
        for each in caches if end else ():
            keys = np.array(each.keys_and_values()[0])[0].swapaxes(0, 1)
            for place, key in enumerate(keys, end - len(keys)):
                by_place[layer, place] = key


def together(
    made: SpeculativeGenerator, requests: Sequence[Asked], options: dict[str, Any]
) -> tuple[list[Any], list[Keys]]:
    results: list[Any] = [None] * len(requests)
    head_keys, uids = [Keys() for _ in requests], dict[int, int]()
    with BatchGenerator(made) as batch:
        number = 0
        while number < 8 or batch.waiting or batch.running:
            for place, one in enumerate(requests):
                if one.joins == number:
                    keywords = {**one.options(), **options}
                    uids[place] = batch.insert(prompt_of(one.prompt), **keywords)
                if one.leaves is not None and one.joins + one.leaves == number:
                    results[place] = batch.remove(uids.pop(place))
            for group in batch._groups.values():
                shared: Any = group._rounds.proposals.shared
                for place, uid in uids.items():
                    request = batch._rows[uid].request
                    if request in shared._requests:
                        index = shared._requests.index(request)
                        hold(head_keys[place], *shared._cache.extract(index)[1:])
            batch.next()
            number += 1
        for place, uid in uids.items():
            results[place] = batch.remove(uid)
        assert not batch.stats.alone
        assert batch.memory == 0
    return results, head_keys


def assert_as_alone(made: SpeculativeGenerator, **options: Any) -> None:
    """Compare results, drafts and the head's keys with those of the requests alone."""
    batched, drafted = Drafts(), Drafts()
    # A quantized request with a prompt of one token would run alone.
    requests = ASKED[:-1] if options else ASKED
    with pytest.MonkeyPatch.context() as patch:
        note(patch, batched)
        results, head_keys = together(made, requests, options)
    for one, result, keys in zip(requests, results, head_keys, strict=True):
        alone_keys = Keys()
        with pytest.MonkeyPatch.context() as patch:
            note(patch, drafted)
            request = {**one.options(), **options}
            stream, alone = made.stream(prompt_of(one.prompt), **request), []
            for chunk in stream:
                alone.append(chunk.token)
                guarded: Any = stream.request.drafter
                head = guarded.inner._cache
                hold(alone_keys, head.layers, head.state)
        count = len(result.tokens)
        assert count > 3
        assert result.tokens == alone[:count]
        assert not result.stats.drafter_faults
        expected: Any = stream.result.logprobs
        pairs = zip(result.logprobs, expected[:count], strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-3, atol=1e-3)
        same = keys.keys() & alone_keys.keys()
        assert len(same) > 15 or not alone_keys
        for place in same:
            np.testing.assert_allclose(keys[place], alone_keys[place], atol=1e-3)
    both = batched.keys() & drafted.keys()
    assert len(both) > 20
    for known in both:
        n = min(len(batched[known]), len(drafted[known]))
        assert batched[known][:n] == drafted[known][:n]


@pytest.mark.parametrize("longest", [1, pytest.param(64, marks=SLOW)])
def test_rows_of_a_chain_draft_what_they_do_alone(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head reads a plain step's token at once (`longest` = 1), or with later ones."""
    for module in (shared_head, mtp):
        monkeypatch.setattr(module, "LONGEST_LAG", longest)
    assert_as_alone(generator("chained"))


@pytest.mark.parametrize(
    ("name", "head"),
    [*covering(TARGETS, HEADS), pytest.param("full", "dense", marks=SLOW)],
)
def test_rows_of_an_assistant_draft_what_they_do_alone(name: str, head: str) -> None:
    quantized = KVQuantization(bits=8, group_size=32, start=0)
    options = {"kv_quantization": quantized} if name == "full" else {}
    assert_as_alone(generator("assistant", name, head), **options)


def _of_other_rows(plain: Any) -> Any:
    def taken(array: mx.array, places: Any) -> mx.array:
        moved: mx.array = plain(mx.roll(array, 1, 0), places)
        return moved

    return taken


def _first_rows_wait(plain: Any) -> Any:
    def leave(self: Any, stay: Any) -> None:
        waiting = self.waiting
        plain(self, stay)
        self.waiting = [None if part is None else part[: len(stay)] for part in waiting]

    return leave


def _in_order(plain: Any) -> Any:
    def places_of(self: Any, lanes: Any) -> list[int]:
        return [*range(len(lanes))][::-1]

    return places_of


def _of_the_first_stop(plain: Any) -> Any:
    def read(self: Any, caches: Any, places: Any, stops: Any, seen: Any) -> Any:
        return plain(self, caches, places, stops[:1] * len(stops), seen)

    return read


def _unmasked(plain: Any) -> Any:
    def read(self: Any, *args: Any) -> Any:
        return {
            kind: each._replace(mask=None) for kind, each in plain(self, *args).items()
        }

    return read


@pytest.mark.parametrize(
    ("kind", "owner", "name", "broken"),
    [
        ("chained", rounds, "_taken", _of_other_rows),
        pytest.param("chained", BatchHeadCache, "leave", _first_rows_wait, marks=SLOW),
        pytest.param("assistant", BatchLane, "places_of", _in_order, marks=SLOW),
        pytest.param(
            "assistant", SharedKv, "read_together", _of_the_first_stop, marks=SLOW
        ),
        ("assistant", SharedKv, "read_together", _unmasked),
    ],
)
def test_states_and_keys_of_another_row_are_seen(
    kind: str, owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    with pytest.raises(AssertionError):
        assert_as_alone(generator(kind))
