"""A model of mlx-vlm as a target, with the interface of an mlx-lm model.

A `VisionTarget` keeps no state of a request. For families with positions of several
axes (M-RoPE), every call passes positions, since mlx-vlm would otherwise keep them on
the model for the next request.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import position
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision import engine_ids
from mlx_speculation.models.vision.families import Family, family_of
from mlx_speculation.models.vision.image_prompt import SLOT, ImagePrompt
from mlx_speculation.models.vision.native_caches import native_caches
from mlx_speculation.models.vision.recurrent_slots import with_slots

if TYPE_CHECKING:
    from mlx_speculation.models.vision.load import Processor


class VisionTarget(nn.Module):
    """The language model of a vision model, as `SpeculativeGenerator` takes a target.

    `vlm` is a model of mlx-vlm, as `mlx_vlm.load` returns it. `processor` makes prompts
    from text and images; None: requests have to pass an `ImagePrompt`.

    Raises:
        UnsupportedModelError: the family is not supported.
        UnsupportedCacheError: the model has caches of an unknown kind.
    """

    def __init__(self, vlm: nn.Module, processor: "Processor | None" = None) -> None:
        super().__init__()
        self.family: Family = family_of(vlm)
        self.vlm = vlm
        self.processor = processor
        self.args = getattr(vlm.config, "text_config", None) or vlm.config
        seen = getattr(self.args, "use_bidirectional_attention", None)
        # Whether tokens of an image see later tokens of the same image
        self.one_pass = bool(self.family.one_pass and seen)
        self.make_cache()  # refuses unknown kinds now

    @property
    def language_model(self) -> Any:
        """The language model, which decodes."""
        return self.vlm.language_model

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        result: list[nn.Module] = self.language_model.layers
        return result

    @property
    def as_mlx_lm(self) -> tuple[str, Any] | None:
        """The module of mlx-lm with the same layers, and their arguments.

        An MTP head is made of these layers. None: no MTP head is known.
        """
        if self.family.text is None:
            return None
        module = f"mlx_lm.models.{self.family.text}"
        kind = importlib.import_module(module).TextModelArgs
        return module, kind.from_dict(dict(vars(self.args)))

    @property
    def placeholder(self) -> int:
        """The token id that stands for a slot of an image."""
        if self.family.slots in ("beyond", "bounds"):
            return SLOT
        token = self.family.placeholder
        if isinstance(token, int):
            return token
        names = ("image_token_id", "image_token_index") if token is None else (token,)
        values = [getattr(self.vlm.config, name, None) for name in names]
        result = next((value for value in values if value is not None), None)
        if not isinstance(result, int):
            raise InvalidRequestError(
                f"The config of {self.family.name} names no token for images."
            )
        return result

    def image_prompt(
        self,
        prompt: Any,
        images: Sequence[Any],
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> ImagePrompt:
        """Return a prompt with images; the arguments are those of `Processor.prompt`.

        Raises:
            InvalidRequestError: there is no processor, or an image or the prompt cannot
                be read.
        """
        if self.processor is None:
            raise InvalidRequestError(
                f"{len(images)} images were passed, and the target has no processor. "
                "Pass an ImagePrompt, or load the model with from_pretrained."
            )
        return self.with_slots(self.processor.prompt(prompt, images, template))

    def with_slots(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return a prompt with one id for each slot of images, see `engine_ids`."""
        kind = self.family.slots
        if not prompt.inputs or prompt.given is not None:
            return prompt
        if kind == "spread":
            rows = self.embedded(prompt)["inputs_embeds"].shape[1]  # not evaluated
            return engine_ids.spread(prompt, self.placeholder, rows)
        if kind == "beyond":
            return engine_ids.beyond(prompt, self.args.vocab_size)
        return engine_ids.bounds(prompt) if kind == "bounds" else prompt

    def embedded(self, prompt: ImagePrompt) -> dict[str, Any]:
        """Return the fields of mlx-vlm's input features for a whole prompt."""
        ids = prompt.input_ids if prompt.given is None else prompt.given
        result: dict[str, Any] = vars(
            self.vlm.get_input_embeddings(
                ids,
                mask=mx.ones_like(ids),
                **{"pixel_values": None, **prompt.inputs},
            )
        )
        return result

    def positions(self, prompt: ImagePrompt) -> tuple[mx.array, mx.array]:
        """Return positions [3, 1, n], and their shift after the prompt [1, 1].

        This is for a family with M-RoPE whose features have no positions.
        """
        result, shift = self.language_model.get_rope_index(
            prompt.input_ids,
            image_grid_thw=prompt.inputs.get("image_grid_thw"),
            attention_mask=mx.ones_like(prompt.input_ids),
        )
        return mx.moveaxis(result, -1, 0) if self.family.axes_last else result, shift

    def make_cache(self) -> list[Any]:
        """Return new empty caches of mlx-lm's classes."""
        return native_caches(self.language_model)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return logits [1, n, vocab] for token ids [1, n] of text."""
        return self.forward(inputs, cache, position(cache) or 0 if cache else 0)

    def forward(
        self, inputs: mx.array, cache: Any, start: int, **more: Any
    ) -> mx.array:
        """Return the language model's logits [1, n, vocab] for token ids [1, n].

        `start` is the position of the first token. `cache` is a list of caches; None:
        no caches. `more` are other arguments of the language model.
        """
        if self.family.mrope and "position_ids" not in more:
            row = mx.arange(start, start + inputs.shape[1])
            more["position_ids"] = mx.broadcast_to(row, (3, 1, row.size))
        if self.family.axes_last:
            more["position_ids"] = mx.moveaxis(more["position_ids"], 0, -1)
        if self.family.recurrent and cache is not None:
            cache = with_slots(cache)
        logits: mx.array = self.language_model(inputs, cache=cache, **more).logits
        return logits
