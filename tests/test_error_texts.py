"""Texts of errors that a caller can cause, if no other test checks them."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_speculation import (
    AssistantDraft,
    MtpConvention,
    Sampling,
    Speculation,
    SpeculationError,
    SpeculativeGenerator,
    demo,
    demo_models,
)
from mlx_speculation.caches import SlidingKVCache
from mlx_speculation.engine import Choose, Proposal, Sequence
from mlx_speculation.models.checkpoints import convention_of
from mlx_speculation.samplers import Chooser
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer


def generator(**options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(build("llama"), byte_tokenizer(), **options)


def odd_attribute() -> None:
    caches = make_prompt_cache(build("llama"))
    caches[1].note = threading.Lock()
    Speculation(caches, isolated=True).__enter__()


def cut_ring() -> None:
    ring: Any = RotatingKVCache(max_size=8)
    rows = mx.zeros((1, 1, 8, 4))
    ring.update_and_fetch(rows, rows)
    ring.keys, ring.values = rows[..., :3, :], rows[..., :3, :]
    SlidingKVCache.from_native(ring)


class Drawing:
    """Calls `choose`, but proposes a token without its distribution."""

    def begin(self, sequence: Sequence) -> None: ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        choose(mx.zeros((1, 256)), sequence.rows(mx.zeros((0,), mx.uint32)))
        return Proposal(mx.array([1], mx.uint32))

    def settle(self, accepted: int) -> None: ...

    def discard(self) -> None: ...


def no_prompts(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_FOLDER", folder)
        demo.demo_prompts()


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "isolated": (
        odd_attribute,
        "A KVCache cannot be copied (cannot pickle '_thread.lock' object), and isolat",
    ),
    "no window": (
        lambda: SlidingKVCache(0),
        "max_size is 0 and slack is 1024. Both have to be at least 1 row.",
    ),
    "no ring": (
        lambda: SlidingKVCache.from_native(KVCache()),  # type: ignore[arg-type]
        "A KVCache with keep=None cannot be converted, only a RotatingKVCache with ke",
    ),
    "cut ring": (
        cut_ring,
        "The ring holds 3 rows at offset 8, but 8 belong there: it was cut. Feed its ",
    ),
    "anchor": (
        lambda: AssistantDraft(
            build("llama"),
            SimpleNamespace(),  # type: ignore[arg-type]
            anchor="end",  # type: ignore[arg-type]
        ),
        "anchor is 'end', and 'state' or 'token' is needed.",
    ),
    "sliding": (
        lambda: generator(sliding="fast"),
        "sliding is 'fast', and 'slack' or 'native' is needed.",
    ),
    "decisions": (
        lambda: generator().stream("x").decisions,
        "The stream keeps no decisions, since explain was False. Start it with explai",
    ),
    "convention value": (
        lambda: MtpConvention(hidden="inside"),  # type: ignore[arg-type]
        "hidden of a convention is 'inside', but has to be one of these: after_norm",
    ),
    "convention norms": (
        lambda: MtpConvention(norms="odd"),  # type: ignore[arg-type]
        "norms of a convention is 'odd', but has to be one of these: stored; plus_one",
    ),
    "convention field": (
        lambda: convention_of({"norm": "stored"}, "the file"),
        "The convention in the file has the unknown field 'norm'; known are hidden, ",
    ),
    "convention in a file": (
        lambda: convention_of({"order": "none"}, "the file"),
        "In the file: order of a convention is 'none', but has to be one of these: emb",
    ),
    "no seed": (
        lambda: Chooser(Sampling(), 8),
        "The seed is None. Call sampling.with_seed().",
    ),
    "folder of the demo": (
        lambda: no_prompts(demo_models()["draft"]),
        "the demonstration prompts are missing: no file ",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_says_what_is_wrong(case: str) -> None:
    cause, said = ERRORS[case]
    with pytest.raises(SpeculationError, match=f"^{re.escape(said)}"):
        cause()


@pytest.mark.filterwarnings("ignore::mlx_speculation.DrafterFaultWarning")
def test_a_drafter_that_hides_its_distribution_is_refused() -> None:
    drawing = generator(draft=Drawing(), draft_length=2, acceptance="rejection")
    sampling = Sampling(temperature=1.0, seed=1)
    result = drawing.generate([1, 2, 3], max_tokens=4, sampling=sampling)
    assert len(result.tokens) == 4
    said = result.stats.drafter_faults[0].reason
    assert (
        "their probabilities are of shape None instead of (1, 256). Return Proposal.of"
        in said
    )
