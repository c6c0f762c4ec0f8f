"""Programs that tests run on several ranks; see `support.processes.ranks`."""

import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    LookupDraft,
    MtpDraft,
    RankLostError,
    Sampling,
    SpeculationError,
    SpeculativeGenerator,
)
from mlx_speculation.demo import demo_models
from mlx_speculation.engine.equivalence import texts as identity
from mlx_speculation.engine.result import Result
from mlx_speculation.models import Parallel
from mlx_speculation.models.mtp import MtpHead
from mlx_speculation.models.sharding import spread
from mlx_speculation.samplers import Chooser, Rows
from support.drafters.broken_drafters import broken
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models import census, mtp_checkpoints
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

FOLDER = Path(os.environ.get("RANKS_FOLDER", "."))
PROMPT, TOKENS = 40, 16  # the prompt is longer than a window of 16

group = mx.distributed.init()
rank = group.rank()


def main() -> None:
    """Run the program that the arguments name, as "name" or "module.name"."""
    faulthandler.dump_traceback_later(900, exit=True)
    name, *arguments = sys.argv[1:]
    module, _, name = name.rpartition(".")
    imported = importlib.import_module(f"support.{module}") if module else None
    program: Callable[..., Any] = (
        getattr(imported, name) if imported else globals()[name]
    )
    try:
        say(program(*arguments))
    except BaseException:
        (FOLDER / "failed").write_text("")
        raise


def say(said: Any) -> None:
    """Write the result for the test, in place of an earlier one."""
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(said))


def built(name: str) -> nn.Module:
    """Return a tiny model, a layout's target ("head/NAME") or a census model."""
    if name.startswith("census/"):
        return census.build(name.removeprefix("census/"))
    layout = name.removeprefix("head/")
    return build(name) if layout == name else mtp_checkpoints.make(layout)[1]


def on_ranks(
    name: str, parallel: Any = "tensor", layers: int | None = None
) -> nn.Module:
    """Return this rank's part of a tiny model, perhaps with more or fewer layers."""
    model = built(name) if layers is None else build(name, layers=layers)
    spread(model, group, parallel)
    return model


def head_of(name: str, model: nn.Module) -> MtpDraft:
    """Return the random head of a layout for this rank's part of its target."""
    layout = name.removeprefix("head/")
    family = mtp_checkpoints.family(mtp_checkpoints.LAYOUTS[layout])
    layers = mtp_checkpoints.make(layout)[2].layers
    chained = family.layers == "chained"
    head = MtpHead(layers, family.convention, chained=chained, depth=family.depth)
    return MtpDraft(model, head)


def generator(model: nn.Module, draft: Any = None, **options: Any) -> Any:
    return SpeculativeGenerator(
        model, byte_tokenizer(), draft=draft, group=group, **options
    )


class Expected:
    """Texts of a whole tiny model, which each rank generates by itself."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.whole = built(name)
        self._plain = SpeculativeGenerator(self.whole, byte_tokenizer())
        ids = mx.array([prompt_of(PROMPT)])
        rows, parts = self.whole(ids), model(ids)
        self.difference = float(mx.abs(rows - parts).max())
        self._texts: dict[float, list[int]] = {}

    def text(self, sampling: Sampling) -> list[int]:
        """Return the plain continuation, longer than the texts to compare."""
        if sampling.temperature not in self._texts:
            result = self._plain.generate(
                prompt_of(PROMPT), max_tokens=TOKENS + 8, sampling=sampling
            )
            self._texts[sampling.temperature] = result.tokens
        return self._texts[sampling.temperature]

    def parting(self, sampling: Sampling, got: list[int]) -> identity.Parting | None:
        """Return where a text differs from the plain text of the whole model."""
        expected = self.text(sampling)[: len(got)]
        pairs = enumerate(zip(expected, got, strict=True))
        first_difference = next(
            ((i, one, two) for i, (one, two) in pairs if one != two), None
        )
        if first_difference is None:
            return None
        shared = prompt_of(PROMPT) + expected[: first_difference[0]]
        row = identity.deciding_row(self.whole, shared, PROMPT, first=1, width=1)
        chooser = Chooser(sampling, 256)
        return identity.weigh(
            chooser, row, Rows(shared), first_difference, self.difference
        )


def texts(
    parallel: Parallel, *cases: str, by_turns: bool = False, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """Generate with drafts of several kinds, and return the comparison of each text.

    A case is an architecture, with its kinds of drafts after a colon. Each kind has a
    greedy and a sampled text, or with `by_turns` one text, greedy or sampled in turn.
    """
    said: list[dict[str, Any]] = []
    turns = cycle([[GREEDY], [SAMPLED]] if by_turns else [[GREEDY, SAMPLED]])
    for case in cases:
        name, _, kinds = case.partition(":")
        model = on_ranks(name, parallel)
        expected = Expected(name, model)
        for kind in kinds.split(","):
            for sampling in next(turns):
                draft, length = _draft(kind, expected, sampling)
                made = generator(model, draft, draft_length=length)
                result = made.generate(
                    prompt_of(PROMPT), max_tokens=tokens, sampling=sampling
                )
                parting = expected.parting(sampling, result.tokens)
                said.append(
                    _shown(result)
                    | {
                        "case": f"{name} {kind} {sampling.temperature}",
                        "difference": expected.difference,
                        "parting": parting and str(parting),
                        "near_tie": parting is None or parting.near_tie,
                    }
                )
    return said


def _draft(kind: str, expected: Expected, sampling: Sampling) -> tuple[Any, int | None]:
    """Return a draft and its length; only rank 0 needs a draft."""
    if kind == "plain" or rank > 0:
        return None, {"measured": None, "plain": 0}.get(kind, 4)
    text = prompt_of(PROMPT) + expected.text(sampling)
    drafts: dict[str, Callable[[], Any]] = {
        "same": lambda: expected.whole,
        "measured": lambda: expected.whole,
        "other": lambda: build("llama", seed=3),
        "mtp": lambda: head_of(expected.name, expected.model),
        "lookup": lambda: LookupDraft(corpus=[text]),
        "mixed": lambda: ScriptedDrafter(text, 0.7, seed=5, ragged=True, least=0),
    }
    return drafts[kind](), None if kind == "measured" else 4


def _shown(result: Result) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "text": result.text,
        "reason": result.finish_reason,
        "drafted": result.stats.drafted,
        "accepted": result.stats.accepted,
        "seed": result.seed,
        "cached": result.cached_tokens,
        "faults": [fault.reason for fault in result.stats.drafter_faults],
    }


def decisions() -> dict[str, Any]:
    """Run streams one after the other, and return the result of each."""
    model = on_ranks("llama")
    draft = build("llama") if rank == 0 else None
    made = generator(model, draft, draft_length=3)
    said: dict[str, Any] = {
        "refused generator": raised(lambda: _lopsided(model)),
        "a batch": raised(lambda: made.generate_batch([[1, 2], [3]])),
        "whole": raised(lambda: generator(build("llama"))),
        "no group": raised(lambda: SpeculativeGenerator(model, byte_tokenizer())),
    }
    seeds = Sampling(temperature=0.8, seed=11 + rank)
    differing: dict[str, dict[str, Any]] = {
        "seed": {"sampling": seeds},
        "length": {"draft_length": 3 + rank},
        "max_tokens": {"max_tokens": 8 + rank},
        "stop": {"stop": "x" * (1 + rank)},
    }
    for name, options in differing.items():
        said[name] = raised(partial(made.generate, prompt_of(PROMPT), **options))
    said["prompt"] = raised(lambda: made.generate(prompt_of(PROMPT + rank)))
    said["no seed"] = _shown(
        made.generate(
            prompt_of(PROMPT), max_tokens=8, sampling=Sampling(temperature=0.8)
        )
    )
    plain = _shown(made.generate(prompt_of(PROMPT), max_tokens=TOKENS))
    said["plain"] = plain
    said["stopped"] = _shown(
        made.generate(prompt_of(PROMPT), max_tokens=TOKENS, stop=plain["text"][9:12])
    )
    said["serial"] = _shown(
        made.generate(
            prompt_of(PROMPT),
            max_tokens=TOKENS,
            sampling=Sampling(logits_processors=[_counting]),
        )
    )
    said["calls"] = len(_calls)
    for rule in ("rejection", "block"):
        ruled = generator(model, draft, draft_length=3, acceptance=rule)
        said[rule] = _shown(
            ruled.generate(prompt_of(PROMPT), max_tokens=12, sampling=SAMPLED)
        )
    said["closed"] = _closed(made, plain["tokens"])
    said["dropped"] = _dropped(made)
    text = prompt_of(PROMPT) + plain["tokens"]
    fault, drafter = OSError("the drafter has failed"), ScriptedDrafter(text, 0.0)
    with broken(ScriptedDrafter, "propose", 3, "before", fault):
        failing = generator(model, drafter, draft_length=3)
        result = failing.generate(prompt_of(PROMPT), max_tokens=TOKENS)
    said["broken"] = _shown(result)
    said["calibrated contexts"] = len(made.calibrate())
    said["after all"] = _shown(made.generate(prompt_of(PROMPT), max_tokens=TOKENS))
    sampling = Sampling(logits_processors=[_failing])
    said["rank 0 raises"] = raised(
        lambda: made.generate(prompt_of(PROMPT), sampling=sampling)
    )
    said["and then"] = _shown(made.generate(prompt_of(PROMPT), max_tokens=TOKENS))
    return said


_calls: list[int] = []


def _counting(tokens: mx.array, logits: mx.array) -> mx.array:
    """Process logits; it is not marked as pure, so it gets one row at a time."""
    _calls.append(len(tokens))
    return logits


def _failing(tokens: mx.array, logits: mx.array) -> mx.array:
    if len(tokens) > PROMPT + 5:
        raise ValueError("the processor has failed")
    return logits


def raised(act: Callable[[], Any]) -> str:
    """Return the text of the raised error, or "" if none is raised."""
    try:
        act()
    except (SpeculationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _lopsided(model: nn.Module) -> None:
    """Make a generator that only rank 1 refuses."""
    generator(model, draft_length=-1 if rank == 1 else 2)


def _closed(made: Any, text: list[int]) -> dict[str, Any]:
    """Run a stream over the caller's caches on all ranks; only rank 0 closes it."""
    cache = make_prompt_cache(made.model)
    stream = made.stream(prompt_of(PROMPT), max_tokens=TOKENS, prompt_cache=cache)
    yielded = []
    for chunk in stream:
        yielded.append(chunk.token)
        if rank == 0 and len(yielded) == 6:
            stream.close()
    result, cached = stream.result, cache[0].offset
    more = made.generate(
        [result.next_token],
        max_tokens=TOKENS - len(result.cached_tokens) + PROMPT - 1,
        prompt_cache=cache,
        cached_tokens=result.cached_tokens,
    )
    return _shown(result) | {
        "held": cached,
        "whole": [*result.cached_tokens[PROMPT:], result.next_token, *more.tokens],
    }


def _dropped(made: Any) -> int:
    for count, _ in enumerate(made.stream(prompt_of(PROMPT), max_tokens=TOKENS)):
        if count == 4:
            break
    return 1


def endless(deed: str, who: str) -> dict[str, Any]:
    """Generate until a rank is lost; return the time and the raised error.

    Rank `who` has the fault `deed`. With "wait" and "prompt" (a long prompt), the test
    kills the rank. With "raise" or "exit", its program raises or exits after some
    tokens. With "fail" and "sulk", its model raises; with "sulk" its process lives on.
    """
    model: Any = (
        on_ranks("llama")
        if group.size() == 2
        else on_ranks("qwen3_moe", "pipeline", layers=group.size())
    )
    made = generator(model, build("llama") if rank == 0 else None, draft_length=2)
    made.generate(prompt_of(PROMPT), max_tokens=4)
    mine = rank == int(who)
    if mine and deed in ("fail", "sulk"):
        model.model.layers[1] = Failing()
    prompt = prompt_of(PROMPT) * (400 if deed == "prompt" else 1)
    try:
        (FOLDER / f"ready{rank}").write_text("")
        with made.stream(prompt, max_tokens=10**6) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    (FOLDER / f"started{rank}").write_text("")
                if count == 9 and mine and deed == "raise":
                    raise ValueError("its program has failed")
                if count == 9 and mine and deed == "exit":
                    os._exit(3)
    except RankLostError as error:
        lost = time.time()
        again = ""
        if "has left the stream" not in str(error):  # if it has, the group is usable
            again = raised(lambda: made.generate(prompt_of(PROMPT)))
        return {"raised": str(error), "at": lost, "again": again}
    except ValueError as error:
        failed = time.time()
        time.sleep(12 if deed == "sulk" else 0)
        return {"raised": str(error), "at": failed}
    raise AssertionError("the stream has ended")


class Failing:
    use_sliding = False

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        raise ValueError("the layer has failed")


def mtp() -> list[dict[str, Any]]:
    folder = demo_models()["hybrid"]
    made = SpeculativeGenerator.from_pretrained(folder, draft="mtp", group=group)
    prompt = "def add(a, b):\n    return"
    said = []
    for sampling in (GREEDY, SAMPLED):
        result = made.generate(
            prompt, max_tokens=TOKENS, sampling=sampling, draft_length=3
        )
        said.append(_shown(result) | {"case": f"mtp {sampling.temperature}"})
    plain = SpeculativeGenerator.from_pretrained(folder) if rank == 0 else None
    for each, sampling in zip(said, (GREEDY, SAMPLED), strict=True):
        if plain is not None:
            result = plain.generate(prompt, max_tokens=TOKENS, sampling=sampling)
            each["plain"] = result.tokens
    return said


def architectures(parallel: Parallel) -> dict[str, Any]:
    """Try every architecture that can be spread; return its texts or its refusal."""
    said: dict[str, Any] = {}
    for name in sorted(census.BUILT):
        model: Any = census.build(name)
        can = hasattr(model, "shard")
        if parallel == "pipeline":
            can = hasattr(getattr(model, "model", None), "pipeline")
        if not can:
            continue
        (FOLDER / f"now{rank}").write_text(name)  # shows which architecture hangs
        try:
            spread(model, group, parallel)
            generator(model)  # raises before any forward if refused
            said[name] = texts(parallel, f"census/{name}:mixed")
        except (SpeculationError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
