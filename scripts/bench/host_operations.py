"""Ways to choose, to hold a window and to index a text, as cases of operations.py."""

import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from bench.device_operations import Case
from bench.models import Bench
from bench.prompts import bundled
from mlx_speculation import LookupDraft, Sampling
from mlx_speculation.caches import SlidingKVCache, Speculation
from mlx_speculation.caches.types.sliding_kv import default_slack
from mlx_speculation.engine.prompt import Sequence as Known
from mlx_speculation.samplers import Chooser, Rows, Verifier

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}
INDEXES: list[Any] = ["automaton", "ngram"]
HEADS, DIM = 4, 128  # of keys and values
FULL = 3  # times that a window is written before it is measured
ENOUGH = 1 << 20  # tokens; no stream here comes to its end


def sampler(rows: Sequence[int], vocabularies: Sequence[int]) -> Iterator[Case]:
    """Decide on the rows of a round: a round with as many drafts first, then verdicts.

    The bundled vocabulary is small, so the logits are random, of the stated width.
    """
    for width in vocabularies:
        for count in rows:
            if count > 1:
                acts = {name: _verdict(width, count, name) for name in OPTIONS}
                a_round = _rounds(count - 1)
                yield f"{count} rows, {width} ids", {"a round": a_round, **acts}


def _rounds(length: int) -> Callable[[], object]:
    """Return what runs a greedy round of the bundled dense target and draft model."""
    bench = Bench.of("dense")
    (question,) = bundled(["code"], 1)["code"]
    stream = bench.generator("model").stream(
        question.prompt(bench.tokenizer),
        max_tokens=ENOUGH,
        stop_tokens=(),
        draft_length=length,
    )
    return stream.next_round


def _verdict(width: int, count: int, options: str) -> Callable[[], object]:
    """Return what decides on the rows of the next round."""
    verifier = Verifier(Chooser(Sampling(seed=1, **OPTIONS[options]), width))
    logits = 3 * mx.random.normal((count, width), key=mx.random.key(0))
    drafted = mx.arange(5, 4 + count, dtype=mx.uint32)
    known = list(range(200))
    mx.eval(logits, drafted)

    def decide() -> None:
        known.extend([1, 2, 3])  # the positions of the next round
        rows = Rows(known, drafted, count)
        mx.eval(*verifier.verify(logits, rows, drafted).arrays)

    return decide


@dataclass(slots=True)
class Concatenating:
    """A window of keys and values that are put together anew in every round."""

    window: int
    keys: mx.array
    values: mx.array

    def write(self, keys: mx.array, values: mx.array, keep: int) -> list[mx.array]:
        """Show the window and the rows, and keep some of them."""
        last = self.window - 1
        pairs = ((self.keys, keys), (self.values, values))
        shown = [
            mx.concatenate([old[..., -last:, :], new], axis=2) for old, new in pairs
        ]
        cut = shown[0].shape[2] - keys.shape[2] + keep
        self.keys, self.values = (each[..., :cut, :] for each in shown)
        return shown


def sliding(rows: Sequence[int], windows: Sequence[int]) -> Iterator[Case]:
    """Write rows of rounds and keep half of them: a KVCache first, then windows."""
    for window in windows:
        for count in rows:
            shape = (2, 1, HEADS, count, DIM)
            keys, values = mx.random.normal(shape, key=mx.random.key(1))
            mx.eval(keys, values)
            keep = (count + 1) // 2
            caches: dict[str, Any] = {
                "KVCache": KVCache(),
                "sliding": SlidingKVCache(window),
                "native ring": RotatingKVCache(max_size=window),
            }
            for cache in caches.values():
                for _ in range(FULL * window // count + 1):
                    cache.update_and_fetch(keys, values)
                mx.eval(cache.state)
            held = Concatenating(window, *_filled(keys, values, window))
            rounds = max(1, default_slack(window) // keep)
            acts: dict[str, Callable[[], object]] = {
                name: partial(_write, cache, keys, values, keep, rounds)
                for name, cache in caches.items()
            }
            acts["concatenating"] = partial(
                _concatenate, held, keys, values, keep, rounds
            )
            yield f"{count} rows, window {window}", acts


def _filled(keys: mx.array, values: mx.array, window: int) -> list[mx.array]:
    times = window // keys.shape[2] + 1
    return [mx.tile(each, (1, 1, times, 1)) for each in (keys, values)]


def _write(
    cache: Any, keys: mx.array, values: mx.array, keep: int, rounds: int
) -> None:
    for _ in range(rounds):
        with Speculation([cache]) as speculation:
            mx.eval(speculation.caches[0].update_and_fetch(keys, values))
            speculation.commit(keep)
    if isinstance(cache, KVCache):  # the others stay as long as they are
        cache.trim(rounds * keep)


def _concatenate(
    held: Concatenating, keys: mx.array, values: mx.array, keep: int, rounds: int
) -> None:
    for _ in range(rounds):
        mx.eval(held.write(keys, values, keep))


def lookup(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[Case]:
    """Index texts of a length, and propose from them, with each kind of index.

    Sources of the standard library, random tokens, and a run of one token, which is the
    worst case of a suffix automaton.
    """
    draw = random.Random(0)
    for length in lengths:
        texts = {
            "code": _code(length),
            "random": [draw.randrange(4096) for _ in range(length)],
            "one token": [7] * length,
        }
        for name, tokens in texts.items():
            acts: dict[str, Callable[[], object]] = {}
            for index in INDEXES:
                drafter = LookupDraft(index=index)
                known = Known(tokens)
                drafter.begin(known)
                acts[f"{index}: a text"] = partial(_index, index, tokens)
                ask = partial(drafter.propose, known, 8, _no_choice)
                acts[f"{index}: a proposal"] = ask
            yield f"{name}, {length} tokens", acts


def _index(name: Any, tokens: list[int]) -> None:
    drafter, known = LookupDraft(index=name), Known(tokens)
    drafter.begin(known)
    drafter.propose(known, 8, _no_choice)


def _code(length: int) -> list[int]:
    """Return bytes of the standard library's sources, in the order of their names."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(found) < length:
            found += path.read_bytes()
    return found[:length]


def _no_choice(*_: Any, **__: Any) -> Any:
    raise AssertionError("a lookup chooses nothing")


HOST: dict[str, Callable[[Sequence[int], Sequence[int]], Iterator[Case]]] = {
    "sampler": sampler,
    "sliding": sliding,
    "lookup": lookup,
}
