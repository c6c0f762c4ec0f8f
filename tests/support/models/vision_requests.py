"""Requests with images to tiny models, shared by several tests."""

from functools import cache
from itertools import zip_longest
from typing import Any

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.engine.stream import Stream
from mlx_speculation.models.vision import ImagePrompt, VisionTarget
from mlx_speculation.models.vision.families import SERVED
from support.models.tiny_vision import VOCAB, prompt_with, tiny, tokenizer

GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, top_p=0.9, seed=11)
TOKENS = 12
NONE: list[tuple[int, int]] = []
ONE = [(4, 6)]
TWO = [(2, 4), (6, 4)]


@cache
def target(name: str) -> VisionTarget:
    return tiny(name)


def generator(model: Any, **options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(model, tokenizer(), **options)


def request_of(prompt: ImagePrompt) -> Any:
    """Return a prompt as a user passes it: as ids if it has no images."""
    return prompt if prompt.inputs else prompt.tokens


def options(sampling: Sampling = GREEDY, **more: Any) -> dict[str, Any]:
    chosen = {"max_tokens": TOKENS, "sampling": sampling, "stop_tokens": ()}
    return {**chosen, "prefill_step_size": 9, **more}


def text(
    model: Any, prompt: ImagePrompt, sampling: Sampling, **draft: Any
) -> list[int]:
    made = generator(model, **draft)
    return made.generate(request_of(prompt), **options(sampling)).tokens


@cache
def _plain(name: str, sizes: tuple[Any, ...], sampling: Sampling, seed: int) -> Any:
    return text(target(name), prompt_with(name, sizes, seed=seed), sampling)


def plain_text(
    name: str, sizes: list[tuple[int, int]], sampling: Sampling = GREEDY, seed: int = 0
) -> list[int]:
    """Return the text of a family's target without drafts; it is decoded once."""
    return list(_plain(name, tuple(sizes), sampling, seed))


def prompt_of(name: str, sizes: list[tuple[int, int]], **more: Any) -> ImagePrompt:
    """Return a prompt with an id for each slot, as the engine reads it."""
    return target(name).with_slots(prompt_with(name, sizes, **more))


def written(name: str) -> int:
    """Return how many ids a family can emit: molmo reads more ids than it emits."""
    return VOCAB if SERVED[name].slots != "beyond" else 256


def most(name: str) -> list[tuple[int, int]]:
    """Return the sizes of two images, or of one if a family reads only one."""
    return ONE if SERVED[name].one_image else TWO


def in_turns(*streams: Stream) -> list[list[int]]:
    rows = zip_longest(*streams)
    columns = zip(*rows, strict=True)
    return [[chunk.token for chunk in column if chunk] for column in columns]
