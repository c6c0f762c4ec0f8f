"""Plain decoding by mlx-lm's own loop, and checks of texts against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.caches import position
from mlx_speculation.engine import Drafter
from mlx_speculation.engine.equivalence import texts as identity
from mlx_speculation.engine.result import Result
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser
from support.drafters.scripted_drafter import ScriptedDrafter, TurningDrafter
from support.models.tiny_tokenizer import byte_tokenizer

SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=11)
GREEDY = Sampling(seed=0)
# Largest difference of a logit that counts as rounding; for tiny models in float32.
ROUNDING = 1e-3
DRAFTERS = ("right", "wrong", "random", "turning")


@dataclass(slots=True)
class Compared:
    """Counts of compared texts, and of events while they were generated."""

    texts: int = 0
    near_ties: int = 0
    reruns: int = 0
    mixer_reruns: int = 0
    rejected: int = 0


def prompt_of(length: int) -> list[int]:
    """Return a prompt that does not repeat itself."""
    return [(37 * i * i + 11 * i + length) % 256 for i in range(length)]


def check_identity(
    model: nn.Module,
    prompt: list[int],
    *,
    draft_length: int,
    tokens: int,
    bitwise: bool,
    kinds: Sequence[str] = DRAFTERS[:3],
    samplings: Sequence[Sampling] = (GREEDY, SAMPLED),
    passed: bool = False,
) -> Compared:
    """Assert that drafts of several kinds do not change texts, greedy and sampled.

    Greedy text must equal that of mlx-lm's own loop. Sampled text must equal our plain
    decoding, since mlx-lm lacks our noise. With `bitwise`, near-ties are errors. With
    `passed`, a `prompt_cache` is passed, which must hold the whole text at the end.
    """
    seen = Compared()
    for sampling in samplings:
        if sampling.greedy:
            expected = plain_text(model, prompt, tokens)
        else:
            plain = SpeculativeGenerator(model, byte_tokenizer())
            result = plain.generate(prompt, max_tokens=tokens, sampling=sampling)
            expected = result.tokens
        for kind in kinds:
            draft, length = _draft(kind, model, prompt + expected, draft_length)
            generator = SpeculativeGenerator(
                model, byte_tokenizer(), draft=draft, draft_length=length
            )
            caches = make_prompt_cache(model) if passed else None
            result = generator.generate(
                prompt, max_tokens=tokens, sampling=sampling, prompt_cache=caches
            )
            assert caches is None or position(caches) == len(prompt) + tokens
            tie = assert_same_text(
                model,
                Chooser(sampling, 256),
                prompt,
                expected,
                result.tokens,
                width=length + 1,
                bitwise=bitwise,
            )
            _check_acceptance(kind, draft, result, exact=tie is None and bitwise)
            seen.texts += 1
            seen.near_ties += tie is not None
            seen.reruns += result.stats.reruns
            seen.mixer_reruns += result.stats.mixer_reruns
            seen.rejected += result.stats.drafted - result.stats.accepted
    return seen


def _draft(
    kind: str, model: nn.Module, text: list[int], length: int
) -> tuple[nn.Module | Drafter, int]:
    """Return a draft of a kind, and the number of tokens that it drafts in a round."""
    if kind == "right":
        return model, length
    if kind == "wrong":  # takes a round for every token, so its drafts are short
        return ScriptedDrafter(text, right=0.0), 2
    seed = len(text)
    if kind == "turning":
        return TurningDrafter(text, seed=seed), length
    return ScriptedDrafter(text, 0.7, seed=seed, ragged=True), length


def _check_acceptance(kind: str, draft: Any, result: Result, *, exact: bool) -> None:
    """Check that as many tokens were accepted as the kind of draft implies."""
    if kind == "turning":
        assert draft.empty
        assert 0 < result.stats.drafts < result.stats.rounds
        assert len({right for _, right in draft.settled}) > 2
        if exact:
            assert all(accepted == right for accepted, right in draft.settled)
    elif kind == "wrong":
        assert result.stats.accepted <= result.stats.drafted // 20
    elif kind == "right" and exact:
        assert result.stats.acceptance_rate == 1.0


def plain_text(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """Decode greedily with mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]


def assert_same_up_to_ties(
    model: nn.Module,
    chooser: Chooser,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    *,
    width: int,
    make_lane: identity.MakeLane = Lane,
) -> identity.Parting | None:
    """Assert that two texts are equal or first differ at a near-tie; return the tie.

    `width` is the largest number of tokens in a forward of the text `got`, k + 1.
    `make_lane` makes the caches that both texts were written with.
    """
    parting = identity.find_parting(
        model, chooser, prompt, expected, got, width=width, make_lane=make_lane
    )
    if parting is not None and not parting.near_tie:
        raise AssertionError(f"the texts are not the same: {parting}")
    return parting


def assert_same_text(
    model: nn.Module,
    chooser: Chooser,
    prompt: list[int],
    expected: list[int],
    got: list[int],
    *,
    width: int,
    bitwise: bool,
    make_lane: identity.MakeLane = Lane,
) -> identity.Parting | None:
    """Assert that texts are equal; unless `bitwise`, they may part at a near-tie."""
    assert expected == got or not bitwise, f"not bit for bit: {expected} and {got}"
    tie = assert_same_up_to_ties(
        model, chooser, prompt, expected, got, width=width, make_lane=make_lane
    )
    if tie is not None:
        # A greater difference is not rounding but a fault, for example of a cache.
        assert tie.difference < ROUNDING, f"more than rounding: {tie}"
        print(f"near-tie: {tie}")  # noqa: T201  the count of near-ties is a result
    return tie
