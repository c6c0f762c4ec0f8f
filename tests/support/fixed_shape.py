"""Compares logits in exact mode at each position of a text, with different drafts.

`compare` runs in a process of its own, where OpenBLAS can be loaded.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.caches import FixedShape, KVQuantization
from mlx_speculation.models import Lane, ModelHooks
from support.models import census
from support.models.tiny_models import TINY_MODELS, build
from support.processes.blas_processes import run_python
from support.processes.reader import ROOT, Reader

Logits = dict[int, NDArray[np.float32]]  # by position
SHAPE = FixedShape(8, 32)
PROMPT = 9


class Round(NamedTuple):
    drafted: int
    right: int  # drafted tokens before the first wrong one


def text_of(length: int, vocab: int = 256) -> list[int]:
    """Return a text that does not repeat itself."""
    return [(37 * i * i + 11 * i + 5) % (vocab - 5) for i in range(length)]


def rounds_of(seed: int, count: int, right: float = 0.8) -> list[Round]:
    """Return rounds of random lengths; each token is right with probability `right`."""
    draw, rounds = random.Random(seed), []
    for _ in range(count):
        drafted = draw.randint(0, SHAPE.rows - 1)
        wrong = (i for i in range(drafted) if draw.random() >= right)
        rounds.append(Round(drafted, next(wrong, drafted)))
    return rounds


def kept_rows(
    model: nn.Module,
    text: Sequence[int],
    rounds: Sequence[Round],
    *,
    shape: FixedShape | None = SHAPE,
    prompt: int = PROMPT,
    quantization: KVQuantization | None = None,
    feed: Callable[[Lane, Sequence[int]], object] = Lane.feed,
) -> Logits:
    """Return the logits of every committed row by position, float32 [vocab] each.

    After the rounds, plain steps go on to the end of the text. Without a shape, the
    mode is not exact.
    """
    lane = Lane(model, sliding="slack", shape=shape)
    lane.quantization = quantization
    feed(lane, text[:prompt])
    rows: Logits = {}
    todo = iter(rounds)
    while lane.seen < len(text):
        at, each = lane.seen, next(todo, Round(0, 0))
        drafts = list(text[at + 1 : at + 1 + each.drafted])
        if each.right < len(drafts):
            drafts[each.right] = (drafts[each.right] + 1) % 251
        fed = [text[at], *drafts][: lane.room]
        keep = min(1 + each.right, len(fed))
        with lane.begin(whole=not drafts) as lane_round:
            logits = lane_round.forward(mx.array(fed)).astype(mx.float32)
            for row in range(keep):
                rows[at + row] = np.array(logits[row])
            lane_round.commit(keep)
    return rows


def differing(some: Logits, others: Logits) -> int:
    """Return how many rows differ bit for bit; both must have the same positions."""
    assert some.keys() == others.keys()
    return sum(some[at].tobytes() != others[at].tobytes() for at in some)


def wide_prompt(lane: Lane, tokens: Sequence[int]) -> None:
    """Prefill a prompt in one forward, which is wrong in exact mode."""
    shape, lane.shape = lane.shape, None
    lane.feed(tokens)
    lane.shape = shape


def compare_wide_prompt(name: str, length: int, prompt: int) -> None:
    """Print how many rows differ if a prompt is not prefilled in blocks."""
    text, model = text_of(length), build(name)
    plain = kept_rows(model, text, (), prompt=prompt)
    wide = kept_rows(model, text, (), prompt=prompt, feed=wide_prompt)
    print(differing(plain, wide))  # noqa: T201


def compare(names: Sequence[str], length: int, seeds: Sequence[int]) -> None:
    """Print counts of each architecture's rows.

    They are: rows that differ in exact mode, rows that differ without it, all rows.
    """
    text = text_of(length)
    for name in names:
        model = build(name) if name in TINY_MODELS else census.build(name)
        hooks = ModelHooks(model)
        counts = []
        for shape in (SHAPE, None):
            plain = kept_rows(model, text, (), shape=shape)
            drafted = [
                kept_rows(model, text, rounds_of(seed, length), shape=shape)
                for seed in seeds
            ]
            counts.append(sum(differing(plain, each) for each in drafted))
        hooks.remove()
        print(json.dumps([name, *counts, len(seeds) * len(plain)]))  # noqa: T201


def compared(
    reader: Reader, names: Sequence[str], length: int, seeds: Sequence[int]
) -> dict[str, tuple[int, int, int]]:
    """Return the output of `compare` in a process that uses OpenBLAS."""
    code = (
        "import mlx.core as mx; import support.fixed_shape as program\n"
        "with mx.stream(mx.cpu): "
        f"program.compare({list(names)}, {length}, {list(seeds)})"
    )
    lines = reader.snippets("compared", [code], ROOT).out.splitlines()
    rows = [json.loads(line) for line in lines]
    return {name: (exact, control, rows) for name, exact, control, rows in rows}


def with_openblas_in_front(call: str, module: str = __name__) -> list[str]:
    """Return the lines that a call in a module prints in a process with OpenBLAS."""
    code = (
        "from mlx_speculation.blas import use_blas; use_blas('openblas'); "
        "import mlx.core as mx; mx.set_default_device(mx.cpu); "
        f"import {module} as program; program.{call}"
    )
    tests = str(Path(__file__).resolve().parents[1])
    paths = [tests, os.environ.get("PYTHONPATH", ""), *filter(None, sys.path)]
    return run_python(code, PYTHONPATH=os.pathsep.join(filter(None, paths)))


MODULES = {name: tiny.module for name, tiny in TINY_MODELS.items()}
