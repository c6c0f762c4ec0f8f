"""The ids of a prompt as the engine reads them: one for each slot of an image.

Most families have such ids already. What others have is said by `Family.slots`:

    spread   one id for an image of however many slots, or another number than that
    beyond   ids that the head has no row for, which cannot be drafted
    bounds   any ids; beside them the processor says where the slots are

A slot is -1 then, which no token is, and the model keeps the ids that were given.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.models.vision.image_prompt import SLOT, ImagePrompt


def spread(prompt: ImagePrompt, placeholder: int, rows: int) -> ImagePrompt:
    """Give an image as many ids as it has rows.

    Args:
        prompt: has a run of placeholders for one image, or one for each of several
            whose rows `pixel_attention_mask` says.
        placeholder: the id, which may be below 0.
        rows: of the prompt's embeddings.
    """
    ids: Any = prompt.input_ids[0].tolist()
    masks: Any = prompt.inputs.get("pixel_attention_mask")
    places = [place for place, token in enumerate(ids) if token == placeholder]
    if masks is not None:
        counts = masks.astype(mx.int32).sum(axis=-1).tolist()
    else:
        counts = [rows - len(ids) + len(places)] + [0] * (len(places) - 1)
    known: list[int] = []
    for token in ids:
        known += [SLOT] * counts.pop(0) if token == placeholder else [token]
    return _known(prompt, known)


def beyond(prompt: ImagePrompt, vocabulary: int) -> ImagePrompt:
    """Replace ids from `vocabulary` on: the head's rows."""
    ids: Any = prompt.input_ids[0].tolist()
    return _known(prompt, [t if t < vocabulary else SLOT for t in ids])


def bounds(prompt: ImagePrompt) -> ImagePrompt:
    """Replace what lies in the bounds [start, stop) of `image_bound`."""
    ids: Any = prompt.input_ids[0].tolist()
    pairs: Any = mx.array(prompt.inputs["image_bound"][0]).reshape(-1, 2).tolist()
    for start, stop in pairs:
        ids[start:stop] = [SLOT] * (stop - start)
    return _known(prompt, ids)


def _known(prompt: ImagePrompt, ids: list[int]) -> ImagePrompt:
    return replace(prompt, input_ids=mx.array([ids]), given=prompt.input_ids)
