"""Texts after images of every size equal mlx-vlm's, with every kind of draft."""

import atexit
import io
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING
from PIL import Image

from mlx_speculation import (
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.models.vision import ImagePrompt, VisionTarget
from mlx_speculation.models.vision.families import SERVED
from mlx_speculation.models.vision.load import usable
from support.covering import others_slow
from support.drafters.scripted_drafter import ScriptedDrafter, TurningDrafter
from support.models.tiny_vision import (
    VOCAB,
    WITHOUT_MLX_VLM,
)
from support.models.vision_folders import END_ID, picture, vision_folder
from support.models.vision_processors import PROCESSORS

pytestmark = [
    WITHOUT_MLX_VLM,
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of Gemma 4's audio
    pytest.mark.filterwarnings("ignore:Image.Image.getdata is"),  # of Kimi's images
]

# Width and height of the images of a prompt
SIZES: dict[str, list[tuple[int, int]]] = {
    "small": [(6, 5)],
    "large": [(64, 48)],
    "wide": [(40, 12)],
    "tall": [(10, 36)],
    "two": [(6, 5), (40, 12)],
}
TOKENS = 12
GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, top_p=0.9, seed=11)
# One for each treatment of sizes: a list of tensors, tiles, padding to the largest
QUICK = ("gemma4", "smolvlm", "pixtral")
# Families whose processors in mlx-vlm save nothing, or files that they cannot load
UNSAVED = {
    *("internvl_chat", "internvl", "llava_onevision"),
    *("muse_glimmer", "glm_ocr", "mage_vl"),
}
Messages = list[dict[str, Any]]


@cache
def folders() -> Path:
    """Return a folder for models, which is removed at the end."""
    made = Path(mkdtemp())
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


# A Gemma 4 in which tokens of an image attend to each other in both directions
BOTH_WAYS = "gemma4, both ways"


@cache
def loaded(name: str) -> tuple[Any, Any]:
    if name == BOTH_WAYS:
        more = {"use_bidirectional_attention": "vision"}
        folder = vision_folder(folders() / "both", "gemma4", **more)
        made = SpeculativeGenerator.from_pretrained(folder, vision=True)
        return made.model, made.tokenizer
    folder = vision_folder(folders() / name, name)
    made = SpeculativeGenerator.from_pretrained(folder, vision=True)
    return made.model, made.tokenizer


def pictures(name: str, size: str, seed: int = 0) -> list[bytes]:
    """Return images of these `SIZES`, or only the last if mlx-vlm reads one image."""
    sizes = SIZES[size]
    if name in SERVED and SERVED[name].one_image:
        sizes = sizes[-1:]
    return [picture(w, h, seed=seed + i) for i, (w, h) in enumerate(sizes)]


def user_turn(text: str, images: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image"}] * images
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def prompt_of(name: str, messages: Messages, images: list[bytes]) -> ImagePrompt:
    result: ImagePrompt = loaded(name)[0].image_prompt(messages, images)
    return result


def tokens(name: str, prompt: Any, sampling: Sampling = GREEDY, **more: Any) -> Any:
    made = SpeculativeGenerator(*loaded(name), **more)
    return made.generate(prompt, **options(sampling)).tokens


def options(sampling: Sampling = GREEDY) -> dict[str, Any]:
    return {
        "max_tokens": TOKENS,
        "sampling": sampling,
        "stop_tokens": (),
        "prefill_step_size": 7,
    }


def theirs(name: str, text: str, images: list[bytes]) -> list[int]:
    """Return mlx-vlm's text for a prompt with images, up to an end of text."""
    import mlx_vlm

    target = loaded(name)[0]
    processor = usable(target.processor._processor, target.vlm.config)
    prompt = mlx_vlm.apply_chat_template(
        processor,
        target.vlm.config,
        [user_turn(text, len(images))],
        num_images=len(images),
    )
    opened = [Image.open(io.BytesIO(data)) for data in images]
    answers = mlx_vlm.stream_generate(
        target.vlm, processor, prompt, opened, max_tokens=TOKENS, temperature=0.0
    )
    return [answer.token for answer in answers][:TOKENS]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        if name in QUICK and size == "two"
        else pytest.param(name, size, marks=pytest.mark.slow)
        for name in (*PROCESSORS, BOTH_WAYS)
        for size in SIZES
    ],
)
def test_a_text_is_that_of_mlx_vlm_at_every_size(name: str, size: str) -> None:
    images = pictures(name, size)
    prompt = prompt_of(name, [user_turn("What is it?", len(images))], images)
    plain = tokens(name, prompt)
    ended = theirs(name, "What is it?", images)
    assert plain[: len(ended)] == ended
    assert len(ended) == TOKENS or ended[-1] == END_ID
    for sampling in (GREEDY, SAMPLED):
        expected = plain if sampling.greedy else tokens(name, prompt, sampling)
        known = prompt.tokens + expected
        drafts = [TurningDrafter(known, VOCAB), LookupDraft()]
        drafts += [ScriptedDrafter(known, share, VOCAB) for share in (1.0, 0.0)]
        for draft in drafts:
            got = tokens(name, prompt, sampling, draft=draft, draft_length=3)
            assert got == expected, type(draft).__name__


@pytest.mark.parametrize(
    "name",
    others_slow([each for each in PROCESSORS if each not in UNSAVED], ("smolvlm",)),
)
def test_what_transformers_writes_of_a_processor_is_read(
    name: str, tmp_path: Path
) -> None:
    """A folder needs no `vision=True` if mlx-lm does not know the architecture."""
    target: Any = loaded(name)[0]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folders() / name / file)
    target.processor._processor.save_pretrained(tmp_path)
    known = find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(name, name)}") is not None
    vision = True if known else None
    again = SpeculativeGenerator.from_pretrained(tmp_path, vision=vision)
    assert isinstance(again.model, VisionTarget)
    images = pictures(name, "two")
    asking = [user_turn("What is it?", len(images))]
    result = again.generate(asking, images=images, **options())
    assert result.tokens == tokens(name, prompt_of(name, asking, images))
