"""`vision_stream_generate` gives mlx-vlm's texts and counts, also with drafts."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_speculation import vision_stream_generate
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision import VisionTarget
from support.models.tiny_vision import WITHOUT_MLX_VLM
from support.models.vision_folders import picture, vision_folder

pytestmark = WITHOUT_MLX_VLM

ASKED = [{"role": "user", "content": "What is it?"}]
PICTURES = [picture(), picture(40, 16, seed=2)]
Loaded = tuple[Any, Any]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    import mlx_vlm

    folder = vision_folder(tmp_path_factory.mktemp("vision") / "qwen3_vl")
    model, processor = mlx_vlm.load(str(folder))
    return model, processor


def prompt_of(loaded: Loaded, images: int) -> str:
    import mlx_vlm

    model, processor = loaded
    text: str = mlx_vlm.apply_chat_template(
        processor, model.config, ASKED, num_images=images
    )
    return text


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_responses_are_those_of_mlx_vlm(
    loaded: Loaded, count: int, draft: str | None
) -> None:
    import mlx_vlm

    model, processor = loaded
    prompt, images = prompt_of(loaded, count), PICTURES[:count]
    opened = [Image.open(io.BytesIO(data)) for data in images]
    theirs = list(
        mlx_vlm.stream_generate(model, processor, prompt, opened or None, max_tokens=12)
    )
    ours = list(
        vision_stream_generate(
            model, processor, prompt, images, draft_model=draft, max_tokens=12
        )
    )
    assert [one.token for one in ours] == [each.token for each in theirs][:12]
    assert "".join(one.text for one in ours) == "".join(t.text for t in theirs)
    assert ours[-1].prompt_tokens == theirs[-1].prompt_tokens
    assert ours[-1].generation_tokens == len(ours)
    assert ours[-1].finish_reason == "length"


def test_one_image_may_stand_alone_and_a_seed_decides(
    loaded: Loaded, tmp_path: Path
) -> None:
    model, processor = loaded
    path = tmp_path / "a.png"
    path.write_bytes(PICTURES[0])
    prompt = prompt_of(loaded, 1)

    def text(image: Any, **more: Any) -> list[int]:
        options = {"max_tokens": 12, "temperature": 0.8, "seed": 5, **more}
        target = VisionTarget(model)
        answers = vision_stream_generate(target, processor, prompt, image, **options)
        return [answer.token for answer in answers]

    expected = text([PICTURES[0]])
    assert text(path) == text(str(path)) == text(PICTURES[0]) == expected
    assert text(path, draft_model="lookup", num_draft_tokens=3) == expected
    assert text(path, seed=6) != expected


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"audio": ["a.wav"]}, InvalidRequestError, "audio was passed"),
        ({"video": "a.mp4"}, InvalidRequestError, "video was passed"),
        (
            {"image": "https://example.org/a.png"},
            InvalidRequestError,
            "URLs are not fetched",
        ),
        ({"image": b"no image"}, InvalidRequestError, "cannot be read"),
        ({"thinking_budget": 3}, TypeError, "no keyword 'thinking_budget'"),
        ({"max_tokens": 0}, InvalidRequestError, "max_tokens is 0"),
        ({"kv_bits": 4}, TypeError, "kv_bits"),
    ],
)
def test_what_is_not_offered_is_refused_in_the_call(
    loaded: Loaded, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        vision_stream_generate(*loaded, "What?", **options)
