"""A prompt with images: token ids, some of which stand for slots (see `engine_ids`).

A slot is a position that is fed an embedding of an image.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_speculation.errors import InvalidRequestError

# The least key of an image's slot in a prefix cache; token ids are smaller.
_LEAST_KEY = 1 << 62
# Stands for a slot that has no token id of its own, or has a negative one.
SLOT = -1
# Outputs of a processor that belong to the text.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids")
# A tensor of all images; a list with a tensor for each image, if their shapes differ
# (Gemma 4); or a list of such lists, one for each prompt (MiniCPM).
ImageTensor = mx.array | list[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """Output of a vision model's processor for a text and its images.

        inputs = mlx_vlm.prepare_inputs(processor, images=images, prompts=text)
        generator.stream(ImagePrompt.of(inputs))

    Args:
        input_ids: token ids [1, n], with one placeholder for each slot of an image.
        inputs: the tensors of the images, by the names of arguments of the model's
            `get_input_embeddings`, such as `pixel_values`. Each is an array, or a list
            with one array for each image if their shapes differ.

    Attributes:
        given: the ids that the model reads, see `engine_ids`; None: `input_ids`.

    Raises:
        InvalidRequestError: the ids do not have shape [1, n], or `inputs` has arrays
            that belong to the text.
    """

    input_ids: mx.array
    inputs: Mapping[str, ImageTensor] = field(default_factory=dict)
    given: mx.array | None = None

    def __post_init__(self) -> None:
        ids = self.input_ids
        if not isinstance(ids, mx.array) or ids.ndim != 2 or ids.shape[0] != 1:
            shape = getattr(ids, "shape", None)
            raise InvalidRequestError(
                f"input_ids of an ImagePrompt have shape {shape}, and [1, n] is "
                "needed: the ids of one prompt."
            )
        wrong = sorted(name for name in self.inputs if name in _OF_TEXT)
        if wrong:
            raise InvalidRequestError(
                f"inputs of an ImagePrompt hold {', '.join(wrong)}, and only tensors "
                "of images belong there. Use ImagePrompt.of(inputs)."
            )

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> "ImagePrompt":
        """Return a prompt made of a processor's output, which includes `input_ids`.

        Raises:
            InvalidRequestError: the output has audio or video, or ids of another shape.
        """
        given = {n: v for n, v in inputs.items() if v is not None}
        other = {n for n in given if "audio" in n or "video" in n or "feature" in n}
        filled = sorted(n for n in other if any(map(_size, _parts(given[n]))))
        if filled:
            raise InvalidRequestError(
                f"The inputs hold {filled[0]!r}, but only images can be read beside "
                "text. Leave audio and video out."
            )
        kept = {n: v for n, v in given.items() if n not in {*_OF_TEXT, *other}}
        return cls(inputs["input_ids"], kept)

    @property
    def tokens(self) -> list[int]:
        """The token ids, with -1 for negative ids of slots."""
        result: Any = self.input_ids[0].tolist()
        return [max(token, SLOT) for token in result]

    def slots(self, placeholder: int) -> list[tuple[int, int]]:
        """Return the places of placeholders: [start, stop) for each run of them."""
        runs, start, kinds = [], 0, (placeholder, SLOT)
        for is_slot, run in groupby(self.tokens, lambda token: token in kinds):
            stop = start + len(list(run))
            if is_slot:
                runs.append((start, stop))
            start = stop
        return runs

    def prefix_keys(self, placeholder: int) -> list[int]:
        """Return the keys of the tokens for a prefix cache.

        The key of a token is its id. The key of an image's slot is a hash of all images
        and of the slot's place, so two prompts share slots only if all their images are
        equal.
        """
        digest = self._digest()
        return [
            _LEAST_KEY + (int.from_bytes(_hash(digest, place)) >> 2)
            if token in (placeholder, SLOT)
            else token
            for place, token in enumerate(self.tokens)
        ]

    def _digest(self) -> bytes:
        result = hashlib.sha256()
        for name, value in sorted(self.inputs.items()):
            for part in _parts(value):
                array = np.array(part.astype(mx.float32) if _is_float(part) else part)
                result.update(f"{name} {array.dtype} {array.shape}".encode())
                result.update(array.tobytes())
        return result.digest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the arrays of an `ImageTensor`."""
    if isinstance(value, list):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _size(value: Any) -> int:
    """Return the number of elements of a processor's output; 1 if it does not say."""
    size = getattr(value, "size", 1)
    return size if isinstance(size, int) else 1


def _is_float(value: mx.array) -> bool:
    # numpy has no bfloat16
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def _hash(digest: bytes, place: int) -> bytes:
    return hashlib.sha256(digest + place.to_bytes(8)).digest()[:8]


def slots_of(
    slots: Sequence[tuple[int, int]], start: int, stop: int
) -> tuple[int, int]:
    """Return the number of slots before `start`, and the number before `stop`."""

    def before(end: int) -> int:
        return sum(max(0, min(end, last) - first) for first, last in slots)

    return before(start), before(stop)
