"""The ids of a prompt as the engine reads them: one for each slot of an image.

A slot is a position at which the model reads an embedding of an image. Most families
have one id for each slot already. The exceptions, by `Family.slots`:

    spread   the number of ids of an image is not its number of slots
    beyond   ids of slots have no row in the output layer, so they cannot be drafted
    bounds   slots can have any ids; the processor returns the bounds of the slots

For these the engine reads -1, which is no token id, in each slot. The model still reads
the original ids, `ImagePrompt.given`.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.models.vision.image_prompt import SLOT, ImagePrompt


def spread(prompt: ImagePrompt, placeholder: int, rows: int) -> ImagePrompt:
    """Return a prompt with as many ids for an image as the image has embedding rows.

    `rows` is the number of the prompt's embeddings. The prompt has placeholders for one
    image only, or a `pixel_attention_mask` that gives the rows of each placeholder.
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
    """Return a prompt with -1 for ids that the output layer has no row for."""
    ids: Any = prompt.input_ids[0].tolist()
    return _known(prompt, [t if t < vocabulary else SLOT for t in ids])


def bounds(prompt: ImagePrompt) -> ImagePrompt:
    """Return a prompt with -1 for ids in the bounds [start, stop) of `image_bound`."""
    ids: Any = prompt.input_ids[0].tolist()
    pairs: Any = mx.array(prompt.inputs["image_bound"][0]).reshape(-1, 2).tolist()
    for start, stop in pairs:
        ids[start:stop] = [SLOT] * (stop - start)
    return _known(prompt, ids)


def _known(prompt: ImagePrompt, ids: list[int]) -> ImagePrompt:
    return replace(prompt, input_ids=mx.array([ids]), given=prompt.input_ids)
