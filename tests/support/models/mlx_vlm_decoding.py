"""Texts of mlx-vlm itself."""

import mlx.core as mx

from mlx_speculation.models.vision import ImagePrompt, VisionTarget


def their_text(target: VisionTarget, prompt: ImagePrompt, tokens: int) -> list[int]:
    """Decode greedily with mlx-vlm's own loop."""
    from mlx_vlm.generate.ar import generate_step

    inputs = dict(prompt.inputs)
    pixels = inputs.pop("pixel_values", None)
    ids = prompt.input_ids if prompt.given is None else prompt.given
    mask = mx.ones_like(ids)
    steps = generate_step(
        ids,
        target.vlm,
        pixels,
        mask,
        max_tokens=tokens,
        temperature=0.0,
        **inputs,
    )
    return [int(token) for token, _ in steps][:tokens]
