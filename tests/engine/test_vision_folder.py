"""Folders of vision models: loading, requests with images, and refusals."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from mlx_speculation import (
    MtpConvention,
    MtpDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.errors import (
    InvalidRequestError,
    ModelFolderError,
    UnsupportedModelError,
)
from mlx_speculation.models import load
from mlx_speculation.models.vision import VisionTarget
from support.covering import others_slow
from support.models.chat_folders import chat_folder
from support.models.mtp_checkpoints import flat
from support.models.tiny_vision import WITHOUT_MLX_VLM
from support.models.vision_folders import picture, vision_folder, with_mtp_head

pytestmark = WITHOUT_MLX_VLM

ASKED = [{"role": "user", "content": "What is it?"}]
CONVENTION = MtpConvention(norms="stored")
PICTURES = [picture(), picture(40, 16, seed=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("vision") / "qwen3_vl")


@pytest.fixture(scope="module")
def generator(folder: Path) -> SpeculativeGenerator:
    return SpeculativeGenerator.from_pretrained(
        folder, vision=True, draft="lookup", draft_length=2
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_messages_with_images_write_what_mlx_vlm_writes(
    generator: SpeculativeGenerator, count: int
) -> None:
    import mlx_vlm

    images = PICTURES[:count]
    model: Any = generator.model
    processor = model.processor._processor
    text = mlx_vlm.apply_chat_template(
        processor, model.vlm.config, ASKED, num_images=count
    )
    opened = [Image.open(io.BytesIO(data)) for data in images]
    theirs = mlx_vlm.stream_generate(
        model.vlm, processor, text, opened or None, max_tokens=16, temperature=0.0
    )
    expected = [answer.token for answer in theirs][:16]
    more: dict[str, Any] = {"max_tokens": 16, "stop_tokens": (), "prefill_step_size": 7}
    assert generator.generate(ASKED, images=images, **more).tokens == expected
    assert generator.generate(text, images=images, **more).tokens == expected


def test_images_stand_where_their_parts_do(generator: SpeculativeGenerator) -> None:
    parts = [
        {"type": "image"},
        {"type": "text", "text": "or"},
        {"type": "image_url", "image_url": {"url": "shown below"}},
        {"type": "text", "text": "?"},
    ]
    stream = generator.stream([{"role": "user", "content": parts}], images=PICTURES)
    (first, second) = stream.request.sequence.images
    between = stream.request.sequence.tokens[first[1] + 1 : second[0] - 1]
    assert generator.tokenizer.decode(between) == "or"


def test_the_image_matters_and_a_path_is_its_bytes(
    generator: SpeculativeGenerator, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURES[0])
    texts = [
        generator.generate(ASKED, images=[image], max_tokens=12).tokens
        for image in (PICTURES[0], path, picture(seed=9))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "images", "why"),
    [
        (ASKED, [b"no image"], "cannot be read"),
        (ASKED, ["https://example.org/a.png"], "URLs are not fetched"),
        (ASKED, [picture(4000, 4)], "aspect ratio"),
        ([1, 2, 3], PICTURES, "neither text nor messages"),
        ("What is it?", PICTURES, "2 images|tensors of images"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
            PICTURES[:1],
            "2 image parts, but 1 images",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            PICTURES[:1],
            "input_audio",
        ),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(
    generator: SpeculativeGenerator, prompt: Any, images: list[Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        generator.stream(prompt, images=images)


def changed(folder: Path, tmp_path: Path, **config: Any) -> Path:
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    data = json.loads((folder / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**data, **config}), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        ({"model_type": "mllama"}, UnsupportedModelError, "cross-attention"),
        ({"model_type": "llama"}, UnsupportedModelError, "no vision model"),
        ({"model_file": "own.py"}, ModelFolderError, "model_file 'own.py'"),
        ({"text_config": {}}, ModelFolderError, "could not load"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, config: Any, error: type[Exception], why: str
) -> None:
    other = changed(folder, tmp_path, **config)
    with pytest.raises(error, match=why):
        SpeculativeGenerator.from_pretrained(other, vision=True)


def test_vision_is_taken_where_mlx_lm_does_not_know_the_architecture(
    folder: Path, tmp_path: Path
) -> None:
    """mlx-lm knows the architecture of `folder`, but not florence2."""
    model, _ = load(folder, vision=None)
    assert not isinstance(model, VisionTarget)
    unknown = changed(folder, tmp_path, model_type="florence2")
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        SpeculativeGenerator.from_pretrained(unknown)


@pytest.mark.parametrize("name", others_slow(["qwen3_5", "qwen3_5_moe"], ["qwen3_5"]))
def test_an_mtp_head_in_the_folder_leaves_the_text_as_it_is(
    name: str, tmp_path: Path
) -> None:
    folder = vision_folder(tmp_path, name)
    with_mtp_head(folder, name)
    made = SpeculativeGenerator.from_pretrained(
        folder, vision=True, draft="mtp", draft_length=2, convention=CONVENTION
    )
    plain = SpeculativeGenerator(made.model, made.tokenizer)
    text_only = SpeculativeGenerator.from_pretrained(
        folder, vision=False, draft="mtp", draft_length=2, convention=CONVENTION
    )
    for sampling in (Sampling(seed=0), Sampling(temperature=0.8, seed=3)):
        more: dict[str, Any] = {"sampling": sampling, "stop_tokens": ()}
        for images in ([], PICTURES):
            request = {"images": images, "max_tokens": 16, **more}
            result = made.generate(ASKED, **request)
            assert result.tokens == plain.generate(ASKED, **request).tokens
            assert result.stats.drafted
            assert not result.stats.drafter_faults
            if not images:  # mlx-lm's model of the same folder, with its head
                other = text_only.generate(ASKED, max_tokens=16, **more)
                assert other.tokens == result.tokens
                assert other.stats.drafted == result.stats.drafted
                assert other.stats.accepted == result.stats.accepted


def test_another_family_has_no_mtp_head(generator: SpeculativeGenerator) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^MTP heads of .* not supported"):
        MtpDraft.from_folder("nowhere", generator.model)


def test_a_stray_file_does_not_replace_weights(folder: Path, tmp_path: Path) -> None:
    """mlx-vlm reads every file, whatever its name, where there is no index."""
    here = tmp_path / "model"
    shutil.copytree(folder, here)
    weights: Any = mx.load(str(here / "model.safetensors"))
    others = {name: value * 0.5 for name, value in weights.items()}
    mx.save_safetensors(str(here / "old.safetensors"), others, {"format": "mlx"})
    both = "'model.safetensors' and 'old.safetensors' in .* both hold"
    with pytest.raises(ModelFolderError, match=both):
        load(here, vision=True)
    index = here / "model.safetensors.index.json"
    places = dict.fromkeys(weights, "model.safetensors")
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    model, _ = load(here, vision=True)
    known, _ = load(folder, vision=True)
    ours, theirs = flat(model), flat(known)
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)
    gone = dict.fromkeys(weights, "model-2.safetensors") | {"a": "model.safetensors"}
    index.write_text(json.dumps({"weight_map": gone}), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"'model-2\.safetensors' holds"):
        load(here, vision=True)


def test_adapters_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="takes neither"):
        SpeculativeGenerator.from_pretrained(folder, vision=True, adapter_path=folder)


def test_a_text_model_reads_no_images(tmp_path: Path) -> None:
    plain = SpeculativeGenerator.from_pretrained(chat_folder(tmp_path / "llama"))
    with pytest.raises(InvalidRequestError, match="reads text only"):
        plain.stream(ASKED, images=PICTURES)
