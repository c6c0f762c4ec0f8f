"""The forwards of one request with images.

    [0, images_end)    the prompt up to its last image is fed as embeddings; the slots
                       of images hold the outputs of the vision tower
    [images_end, ...)  the rest of the prompt and the generated text are fed as token
                       ids, at positions that the images have shifted

The offset of the caches tells which of the two parts comes next.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.caches import position
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models.vision.image_prompt import ImagePrompt, slots_of
from mlx_speculation.models.vision.vision_target import VisionTarget

# Fields of mlx-vlm's features with an axis of the prompt's length, and that axis.
_ALONG = {"position_ids": -1, "visual_pos_masks": 1, "per_layer_inputs": 1}
# Other known fields: read by name below, or not read by supported models in a prefill.
_UNREAD = {"inputs_embeds", "attention_mask_4d", "attention_mask", "rope_deltas"}
_PER_SLOT = "deepstack_visual_embeds"


class ImageForward:
    """Calls the target for one request: `forward(ids [1, n], cache) -> logits`.

    The vision tower runs in the first call, unless this call begins behind the last
    image.

    Attributes:
        slots: the runs of image slots in the prompt, [start, stop) each.
        one_pass: whether the prompt up to its last image has to be fed in one forward.

    Raises:
        InvalidRequestError: the prompt has tensors of images but no placeholders, or
            the reverse; more images than the family reads; or an image at its end.
    """

    def __init__(self, target: VisionTarget, prompt: ImagePrompt) -> None:
        self._target, self._prompt = target, prompt
        self.slots = prompt.slots(target.placeholder)
        length = prompt.input_ids.shape[1]
        if bool(self.slots) != bool(prompt.inputs):
            raise InvalidRequestError(
                f"The prompt has {len(prompt.inputs)} tensors of images, but "
                f"{len(self.slots)} places with the image token {target.placeholder}. "
                "Pass as many images as the text has markers for."
            )
        if target.family.one_image and _images(prompt) > 1:
            raise InvalidRequestError(
                f"The prompt has {_images(prompt)} images, but mlx-vlm reads only one "
                f"in a prompt of {target.family.name}. Ask about one."
            )
        self.one_pass = target.one_pass and bool(self.slots)
        self._end = self.slots[-1][1] if self.slots else 0
        if self._end == length:
            raise InvalidRequestError(
                f"The prompt's {length} tokens end with an image, but a text has to "
                "follow it. Put the question after the image."
            )
        self._features: Any = None
        self._shift: int | None = None

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        """Feed token ids [1, n], and return logits [1, n, vocab]."""
        start = position(cache) or 0
        if self._shift is None and start >= self._end:
            self._read()  # the caches hold all images already; the shift is needed
        if start >= self._end:
            self._features = None  # frees memory of the size of the prompt
            assert self._shift is not None
            return self._target.forward(inputs, cache, start + self._shift)
        stop = start + inputs.shape[1]
        more = self._part(start, stop)
        return self._target.forward(inputs, cache, start, **more)

    def _read(self) -> Any:
        """Return the features of the whole prompt, built once and evaluated later."""
        if self._features is None:
            prompt = self._prompt
            fields = self._target.embedded(prompt)
            unknown = {n for n, v in fields.items() if v is not None}
            unknown -= {*_ALONG, *_UNREAD, _PER_SLOT}
            if unknown:
                raise UnsupportedModelError(
                    f"{self._target.family.name} passes {', '.join(sorted(unknown))} "
                    "from its images to its language model, which is not supported."
                )
            rows, ids = fields["inputs_embeds"].shape[1], prompt.input_ids.shape[1]
            if rows != ids:
                raise UnsupportedModelError(
                    f"{self._target.family.name} makes {rows} embeddings for a prompt "
                    f"of {ids} tokens. Pass a prompt as its processor makes it."
                )
            deltas = fields.get("rope_deltas")
            if self._target.family.mrope and fields.get("position_ids") is None:
                positions, deltas = self._target.positions(prompt)
                fields = {**fields, "position_ids": positions}
            self._shift = 0 if deltas is None else int(deltas.item())
            self._end = max(self._end, _last_moved(fields, self._shift) + 1)
            self._features = fields
        return self._features

    def _part(self, start: int, stop: int) -> dict[str, Any]:
        """Return the arguments of the language model for tokens [start, stop)."""
        fields = self._read()
        # A new array, since gemma3 scales its argument in place.
        result: dict[str, Any] = {
            "inputs_embeds": fields["inputs_embeds"][:, start:stop]
        }
        if self.one_pass:
            assert start == 0
            assert stop >= self._end
            ids = self._prompt.input_ids[:, :stop]
            kinds = (ids == self._target.placeholder).astype(mx.int32)
            result["mm_token_type_ids"] = kinds
        for name, axis in _ALONG.items():
            value = fields.get(name)
            if value is not None:
                along = value[..., start:stop] if axis == -1 else value[:, start:stop]
                result[name] = along
        stack = fields.get(_PER_SLOT)
        if isinstance(stack, mx.array):  # the model slices the array itself
            result |= {name: fields[name] for name in (_PER_SLOT, "visual_pos_masks")}
            return result
        first, last = slots_of(self.slots, start, stop)
        if stack is not None and first < last:
            layers = getattr(stack, "embeddings", stack)
            result[_PER_SLOT] = [layer[first:last] for layer in layers]
        else:
            result.pop("visual_pos_masks", None)
        return result


def _images(prompt: ImagePrompt) -> int:
    """Return the number of images of a prompt, for families that read only one."""
    pixels = prompt.inputs.get("pixel_values")
    if isinstance(pixels, list):  # DeepSeek-OCR: crops of all images, and the images
        pixels = pixels[-1]
    return 0 if pixels is None else len(pixels)


def _last_moved(fields: dict[str, Any], shift: int) -> int:
    """Return the last place whose position is not place + shift; -1: no such place.

    In MiniCPM that place can be the token after the last image.
    """
    positions = fields.get("position_ids")
    if positions is None:
        return -1
    ids = positions.reshape(-1, positions.shape[-1])
    places = mx.arange(ids.shape[-1])
    moved = mx.any(ids != places + shift, axis=0)
    last: Any = mx.where(moved, places, -1).max().item()
    return int(last)
