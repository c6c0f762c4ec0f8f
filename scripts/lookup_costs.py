"""What a lookup costs on the host: time and memory for each token of context.

Four texts of the same length: sources of the standard library in tokens of the bundled
models, random tokens, a passage of 500 tokens again and again, and a run of one token,
which is the worst case of a suffix automaton. Times are medians over slices of 1,000
tokens, of the whole text and of its last tenth, so that a slow moment of the machine
does not count.
"""

import random
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mlx_speculation import LookupDrafter
from mlx_speculation.engine.lookup.index import Index
from mlx_speculation.engine.lookup.ngram_index import LONGEST_MATCH, NgramIndex
from mlx_speculation.engine.lookup.suffix_automaton import SuffixAutomaton
from mlx_speculation.engine.prompt import Sequence as Known

SLICE = 1000
CALLS = 300
INDEXES: dict[str, Callable[[], Index]] = {
    "automaton": SuffixAutomaton,
    "ngram": partial(NgramIndex, 4),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One index on one text.

    Attributes:
        index: its name.
        text: what it was fed.
        tokens: how many.
        append: microseconds to index a token, over the whole text.
        append_at_end: the same over the last tenth.
        propose: microseconds of a proposal from the text itself, its array included.
        other: microseconds to find the end of another text in this one.
        bytes_per_token: memory of the index over its tokens.
    """

    index: str
    text: str
    tokens: int
    append: float
    append_at_end: float
    propose: float
    other: float
    bytes_per_token: float


def measure_costs(tokenizer: Any, tokens: int) -> list[Cost]:
    """Measure every index on every text."""
    texts = _texts(tokenizer, tokens)
    return [_cost(index, text, texts[text]) for text in texts for index in INDEXES]


def _texts(tokenizer: Any, tokens: int) -> dict[str, list[int]]:
    code = _code(tokenizer, tokens)
    draw = random.Random(0)
    return {
        "code": code,
        "random": [draw.randrange(4096) for _ in range(tokens)],
        "repeated": (code[:500] * (tokens // 500 + 1))[:tokens],
        "one token": [7] * tokens,
    }


def _code(tokenizer: Any, tokens: int) -> list[int]:
    """Return sources of the standard library, in the order of their names."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += tokenizer.encode(text, add_special_tokens=False)
        if len(found) >= tokens:
            return found[:tokens]
    return (found * (tokens // len(found) + 1))[:tokens]


def _cost(name: str, text: str, tokens: Sequence[int]) -> Cost:
    index = INDEXES[name]()
    slices = [
        _microseconds(partial(_append, index, tokens[start : start + SLICE])) / SLICE
        for start in range(0, len(tokens) - SLICE + 1, SLICE)
    ]
    tail = list(tokens[-LONGEST_MATCH:])
    other = median(_microseconds(lambda: index.match_of(tail)) for _ in range(CALLS))
    drafter = LookupDrafter(index="ngram" if name == "ngram" else "automaton")
    known = Known(list(tokens))
    drafter.begin(known)
    propose = partial(drafter.propose, known, 8, _no_choice)
    propose()
    return Cost(
        index=name,
        text=text,
        tokens=len(tokens),
        append=median(slices),
        append_at_end=median(slices[-max(1, len(slices) // 10) :]),
        propose=median(_microseconds(propose) for _ in range(CALLS)),
        other=other,
        bytes_per_token=_bytes(name, tokens) / len(tokens),
    )


def _append(index: Index, tokens: Sequence[int]) -> None:
    append = index.append
    for token in tokens:
        append(token)


def _bytes(name: str, tokens: Sequence[int]) -> int:
    tracemalloc.start()
    try:
        index = INDEXES[name]()
        _append(index, tokens)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _microseconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return 1e6 * (time.perf_counter() - started)


def _no_choice(*_: Any, **__: Any) -> Any:
    raise AssertionError("a lookup chooses nothing")
