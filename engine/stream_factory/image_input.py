"""Image input: the checks and the lanes of a request with images."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from mlx_speculation.engine.options import StreamOptions
from mlx_speculation.engine.prompt import Prompt, Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane
from mlx_speculation.models.vision import (
    ImageForward,
    ImagePrompt,
    VisionTarget,
)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A checked prompt with images."""

    prompt: ImagePrompt
    forward: ImageForward

    def ids(self, highest: int) -> list[int]:
        """Return the prompt's ids, with `highest` where an image position has no id."""
        return [token if token >= 0 else highest for token in self.prompt.tokens]

    def prefix_keys(self, model: VisionTarget) -> list[int]:
        """Return the keys of the tokens for a prefix cache; hashes all images."""
        return self.prompt.prefix_keys(model.placeholder)

    def enter(self, sequence: Sequence, target: Lane) -> None:
        """Attach the images to a stream's sequence and target lane."""
        sequence.images = tuple(self.forward.slots)
        target.run = self.forward
        if self.forward.one_pass:
            target.prefill_step = len(sequence.tokens)


def image_input(
    model: Any, prompt: Prompt, options: StreamOptions
) -> ImageInput | None:
    """Return the checked image input of a request; None: it has no images.

    Raises:
        InvalidRequestError: an image, the prompt or an option cannot be used.
    """
    wanted = isinstance(prompt, ImagePrompt) or len(options.images) > 0
    if isinstance(model, VisionTarget):
        _check_options(model, options, wanted=wanted)
    elif wanted:
        raise InvalidRequestError(
            f"Images were passed, and {type(model).__module__} reads text only. Load a "
            "vision model with from_pretrained(path, vision=True)."
        )
    if not wanted:
        return None
    made = model.with_slots(_prompt(model, prompt, options.images))
    return ImageInput(made, ImageForward(model, made))


def _prompt(
    model: VisionTarget, prompt: Prompt, images: SequenceOf[Any]
) -> ImagePrompt:
    """Return the prompt as the target's image processor encodes it."""
    if not isinstance(prompt, ImagePrompt):
        return model.image_prompt(prompt, images)
    if images:
        raise InvalidRequestError(
            f"{len(images)} images were passed with an ImagePrompt, which has its own. "
            "Leave images out."
        )
    return prompt


def _check_options(
    model: VisionTarget, options: StreamOptions, *, wanted: bool
) -> None:
    """Refuse untried quantized caches, and passed caches if there may be images."""
    name = model.family.name
    if options.kv_quantization is not None and (
        not model.family.quantizes or model.one_pass
    ):
        raise InvalidRequestError(
            f"kv_quantization was passed, but {name} cannot have quantized caches, or "
            "was not tried with them. Leave it out."
        )
    if not options.own_caches:
        return
    cached = options.cached_tokens
    known = None if cached is None else list(cached)
    if wanted or known is None or model.placeholder in known:
        raise InvalidRequestError(
            "prompt_cache was passed to a vision model, in which images change the "
            "positions of later tokens. If there are no images, pass cached_tokens "
            "too. Else leave prompt_cache out, pass the whole conversation with its "
            "images, and let a PrefixCache find what is known of it."
        )
