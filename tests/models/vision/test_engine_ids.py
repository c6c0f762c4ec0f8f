"""Prompts as the engine reads them: -1 in each slot (position) of an image."""

from typing import Any

import mlx.core as mx

from mlx_speculation.models.vision import ImagePrompt
from mlx_speculation.models.vision.engine_ids import beyond, bounds, spread


def prompt(ids: list[int], **inputs: Any) -> ImagePrompt:
    return ImagePrompt(mx.array([ids]), inputs)


def test_one_id_becomes_as_many_as_there_are_rows() -> None:
    given = prompt([1, -200, 2, 3])
    made = spread(given, -200, 6)
    assert made.tokens == [1, -1, -1, -1, 2, 3]
    assert made.slots(-200) == [(1, 4)]
    assert made.given is given.input_ids


def test_a_run_of_another_length_becomes_as_many_as_there_are_rows() -> None:
    assert spread(prompt([1, 9, 9, 9, 2]), 9, 4).tokens == [1, -1, -1, 2]
    assert spread(prompt([1, 9, 9, 2]), 9, 7).tokens == [1, -1, -1, -1, -1, -1, 2]
    assert spread(prompt([1, 2]), 9, 2).tokens == [1, 2]


def test_images_of_sizes_of_their_own_have_as_many_as_their_masks_say() -> None:
    masks = mx.array([[1, 1, 0], [1, 1, 1]])
    made = spread(prompt([1, -200, 2, -200, 3], pixel_attention_mask=masks), -200, 8)
    assert made.slots(-200) == [(1, 3), (4, 7)]


def test_ids_without_a_row_in_the_head_are_slots() -> None:
    made = beyond(prompt([1, 8, 9, 9, 8, 3]), 8)
    assert made.tokens == [1, -1, -1, -1, -1, 3]
    assert made.prefix_keys(-1)[0] == 1
    assert len(set(made.prefix_keys(-1))) == 6


def test_bounds_say_where_slots_are() -> None:
    ids = list(range(8))
    made = bounds(prompt(ids, image_bound=[mx.array([[1, 3], [5, 6]])]))
    assert made.tokens == [0, -1, -1, 3, 4, -1, 6, 7]
    none = bounds(prompt(ids, image_bound=[mx.zeros((0, 2), mx.int32)]))
    assert none.tokens == ids


def test_numbers_below_0_are_slots() -> None:
    made = prompt([1, -1, -1, -2, 5])
    assert made.tokens == [1, -1, -1, -1, 5]
    assert made.slots(7) == [(1, 4)]
