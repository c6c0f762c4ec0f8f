"""`vision_stream_generate` with mlx-vlm's arguments and defaults, and speculation.

    from mlx_vlm import load
    from mlx_speculation import vision_stream_generate   # instead of mlx_vlm's

    for response in vision_stream_generate(model, processor, prompt, "a.png"):
        print(response.text, end="")

The greedy text equals mlx-vlm's. Above temperature 0 the seed determines the text, with
or without a draft. Filters are applied in the order of `Sampling`.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.engine.generator import SpeculativeGenerator
from mlx_speculation.engine.mlx_lm_compat.response import Progress, responses
from mlx_speculation.engine.mlx_lm_compat.stream_generate import Responses
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import PREFILL_STEP, logit_width
from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.models.vision.load import Processor, tokenizer_of
from mlx_speculation.samplers import LogitsProcessor, Sampling


def vision_stream_generate(
    model: nn.Module,
    processor: Any,
    prompt: str,
    image: Any = None,
    audio: Any = None,
    video: Any = None,
    *,
    draft_model: DraftArgument | None = None,
    num_draft_tokens: int | None = None,
    max_tokens: int = 2048,
    prefill_step_size: int | None = PREFILL_STEP,
    temperature: float | None = 0.0,
    top_p: float | None = 1.0,
    min_p: float = 0.0,
    top_k: int | None = 0,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = 20,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    **unknown: Any,
) -> Responses:
    """Generate as `mlx_vlm.stream_generate` does, faster if a draft helps.

    The call checks all arguments; the model runs when the first response is read.

    Args:
        model: the target, loaded by mlx-vlm, or a `VisionTarget` of such a model.
        processor: its processor.
        prompt: text, with the family's marker for each image.
        image: one image or several, see `open_image`; URLs are not fetched.
        audio: refused.
        video: refused.
        draft_model: see `draft` of `GeneratorOptions`; None: plain decoding.
        num_draft_tokens: tokens to draft in a round; None: an adaptive number.
        max_tokens: at least 1.
        prefill_step_size: the largest number of prompt tokens of a forward.
        temperature: 0 or None: greedy; for this and the next options see `Sampling`.
        top_p: 1 or None: all tokens.
        min_p: 0: all tokens.
        top_k: 0 or None: all tokens.
        seed: None: drawn.
        repetition_penalty: None: no penalty.
        repetition_context_size: 0 or None: no penalty.
        logits_processors: called as in plain decoding.
        unknown: refused.

    Raises:
        TypeError: a keyword is unknown.
        InvalidRequestError: an option is refused, or an image cannot be read.
        UnsupportedModelError: the model's family is not supported.
    """
    _check_keywords(unknown, audio, video)
    window = repetition_context_size or 0
    drawn = (temperature or 0.0, top_p or 1.0, min_p, top_k or 0, seed)
    sampling = _sampling(*drawn, repetition_penalty, window, logits_processors or ())
    length = 0 if draft_model is None else num_draft_tokens
    sizes = (max_tokens, prefill_step_size or PREFILL_STEP)
    drafts = (draft_model, length)
    return _responses(model, processor, prompt, image, sampling, drafts, sizes)


def _responses(
    model: nn.Module,
    processor: Any,
    prompt: str,
    image: Any,
    sampling: Sampling,
    drafts: tuple[DraftArgument | None, int | None],  # the draft, and its length
    sizes: tuple[int, int],  # of the text and of a prefill step, in tokens
) -> Responses:
    target = model if isinstance(model, VisionTarget) else VisionTarget(model)
    draft, length = drafts
    generator = SpeculativeGenerator(
        target, tokenizer_of(processor), draft=draft, draft_length=length
    )
    options: StreamKeywords = {
        "max_tokens": checked_count("max_tokens", sizes[0], 1),
        "sampling": sampling,
        "logprobs": 0,
        "logprob_rows": True,
        "prefill_step_size": checked_count("prefill_step_size", sizes[1], 1),
    }
    encoded: Any = prompt
    if images := _as_list(image):
        encoded = Processor(processor, target.vlm.config).prompt(prompt, images, {})
    stream = generator.stream(encoded, **options)
    return responses(
        stream,
        generator.tokenizer,
        _detokenizer(processor, generator.tokenizer),
        Progress(None, len(stream.request.sequence.tokens)),
        logit_width(target),
    )


def _sampling(
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
    seed: int | None,
    penalty: float | None,
    window: int,
    processors: Sequence[LogitsProcessor],
) -> Sampling:
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        repetition_penalty=penalty,
        repetition_context_size=window,
        logits_processors=processors,
    )


def _check_keywords(unknown: Iterable[str], audio: Any, video: Any) -> None:
    if unknown:
        raise TypeError(
            f"vision_stream_generate() takes no keyword "
            f"{', '.join(map(repr, unknown))}. mlx_speculation.SpeculativeGenerator "
            "has more options."
        )
    for name, given in (("audio", audio), ("video", video)):
        if given:
            raise InvalidRequestError(
                f"{name} was passed, but only text and images can be read. Leave "
                f"{name} out."
            )


def _as_list(image: Any) -> list[Any]:
    if image is None:
        return []
    alone = isinstance(image, str | bytes) or not isinstance(image, Sequence)
    return [image] if alone else list(image)


def _detokenizer(processor: Any, tokenizer: Any) -> Any:
    """Return a new detokenizer: a copy of the processor's, or else the tokenizer's."""
    detokenizer = getattr(processor, "detokenizer", None)
    if detokenizer is None:
        return tokenizer.detokenizer
    result = copy.copy(detokenizer)  # each stream needs its own
    result.reset()
    return result
