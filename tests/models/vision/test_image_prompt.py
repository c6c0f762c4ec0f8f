"""Prompts with images: slots, keys, and inputs that are refused."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision import ImagePrompt
from mlx_speculation.models.vision.image_prompt import slots_of

IDS = mx.array([[1, 9, 9, 2, 9, 3]])


def prompt(value: float = 0.5) -> ImagePrompt:
    return ImagePrompt(IDS, {"pixel_values": mx.full((1, 3), value)})


def test_slots_are_runs_of_placeholders() -> None:
    assert prompt().slots(9) == [(1, 3), (4, 5)]
    assert prompt().slots(7) == []
    assert prompt().tokens == [1, 9, 9, 2, 9, 3]


def test_slots_are_counted_up_to_a_place() -> None:
    slots = prompt().slots(9)
    assert slots_of(slots, 0, 6) == (0, 3)
    assert slots_of(slots, 2, 4) == (1, 2)
    assert slots_of(slots, 5, 6) == (3, 3)


def test_keys_are_those_of_the_images() -> None:
    keys = prompt().prefix_keys(9)
    assert [keys[i] for i in (0, 3, 5)] == [1, 2, 3]
    slots = [keys[i] for i in (1, 2, 4)]
    assert len(set(slots)) == 3
    assert all(key >= 1 << 62 for key in slots)
    assert keys == prompt().prefix_keys(9)
    assert not set(slots) & set(prompt(0.25).prefix_keys(9))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.uint8, mx.int32])
def test_keys_follow_from_tensors_of_every_kind(dtype: mx.Dtype) -> None:
    one = ImagePrompt(IDS, {"pixel_values": mx.array([[1, 2]], dtype)})
    other = ImagePrompt(IDS, {"pixel_values": mx.array([[1], [2]], dtype)})
    named = ImagePrompt(IDS, {"image_sizes": mx.array([[1, 2]], dtype)})
    keys = {each.prefix_keys(9)[1] for each in (one, other, named)}
    assert len(keys) == 3


def test_keys_follow_from_tensors_of_shapes_of_their_own() -> None:
    parts = [mx.zeros((1, 2)), mx.zeros((3, 2))]
    keys = {
        ImagePrompt(IDS, {"pixel_values": each}).prefix_keys(9)[1]
        for each in (parts, parts[::-1], parts[:1], parts[0])
    }
    assert len(keys) == 3  # a list of one tensor has the tensor's key
    assert ImagePrompt.of({"input_ids": IDS, "pixel_values": parts}).inputs


def test_what_a_processor_returns_is_taken_apart() -> None:
    pixels = mx.zeros((1, 3))
    made = ImagePrompt.of(
        {"input_ids": IDS, "attention_mask": IDS, "pixel_values": pixels, "x": None}
    )
    assert set(made.inputs) == {"pixel_values"}


def test_other_media_may_be_empty() -> None:
    none: dict[str, Any] = {"video_sizes": [], "num_frames_per_video": mx.zeros((1, 0))}
    made = ImagePrompt.of({"input_ids": IDS, "grids_videos": [[]], **none})
    assert made.inputs == {}


@pytest.mark.parametrize(
    "name", ["pixel_values_videos", "video_grid_thw", "input_features", "audio_values"]
)
def test_other_media_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        ImagePrompt.of({"input_ids": IDS, name: IDS})


def test_what_is_no_prompt_is_refused() -> None:
    for ids in (mx.array([1, 2]), mx.array([[1], [2]])):
        with pytest.raises(InvalidRequestError, match="the ids of one prompt"):
            ImagePrompt(ids)
    with pytest.raises(InvalidRequestError, match="attention_mask"):
        ImagePrompt(IDS, {"attention_mask": IDS})
