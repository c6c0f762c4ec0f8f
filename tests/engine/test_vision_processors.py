"""Prompts from processors of mlx-vlm, for families without a tiny model folder."""

import io
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from PIL import Image

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.models.vision.load import Processor
from support.models.tiny_vision import WITHOUT_MLX_VLM, tiny, tokenizer
from support.models.vision_folders import picture

pytestmark = [
    WITHOUT_MLX_VLM,
    pytest.mark.slow,
    # mlx-vlm uses a function that Pillow 14 removes
    pytest.mark.filterwarnings("ignore:Image.Image.getdata:DeprecationWarning"),
]

SIZES = [(24, 16), (16, 40)]
_GRID: dict[str, Any] = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}
_ANYRES: dict[str, Any] = {
    "size": {"height": 16, "width": 16},
    "crop_size": {"height": 16, "width": 16},
    "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
    "do_center_crop": False,
}


def tokens(*names: str, **special: str) -> Any:
    """Return a transformers tokenizer: ids below 256 are bytes, then come `names`."""
    inner = tokenizer(names)._tokenizer
    inner.add_special_tokens(
        {"additional_special_tokens": list(names), "pad_token": names[-1], **special}
    )
    inner.eos_token = "<|7|>"
    return inner


def home(name: str) -> Any:
    return import_module(f"mlx_vlm.models.{name}")


def minicpm() -> tuple[Any, str]:
    names = ("<image>", "</image>", "<|image_pad|>", "<|video_pad|>")
    slices = ("<slice>", "</slice>", "<unk>")
    module = home("minicpmv4_6.processing_minicpmv4_6")
    images = module.MiniCPMVImageProcessor(
        patch_size=4,
        scale_resolution=32,
        image_feature_size=4,
        max_slice_nums=2,
        use_image_id=False,
    )
    made = tokens(*names, *slices, unk_token="<unk>")
    return module.MiniCPMVProcessor(images, made), "<image>./</image>"


def molmo() -> tuple[Any, str]:
    module = home("molmo.processing_molmo")
    images = module.MolmoImageProcessor(
        max_crops=2,
        overlap_margins=[0, 0],
        base_image_input_size=[16, 16],
        image_token_length_w=2,
        image_token_length_h=2,
        image_patch_size=4,
    )
    made = tokens("<im_start>", "<im_end>", "<im_patch>", "<im_col>")
    return module.MolmoProcessor(images, made), ""


def molmo2() -> tuple[Any, str]:
    module = home("molmo2.processing")
    images = module.Molmo2ImageProcessor(
        size=_ANYRES["size"],
        max_crops=2,
        overlap_margins=[0, 0],
        patch_size=4,
        pooling_size=[2, 2],
    )
    names = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>")
    more = ("<low_res_im_start>", "<im_low>", "<|image|>")
    return module.Molmo2Processor(images, tokens(*names, *more)), "<|image|>"


def jina() -> tuple[Any, str]:
    module = home("jina_vlm.processing_jinavlm")
    names = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
    made = module.JinaVLMProcessor(tokens(*names))
    made._image_proc = home("jina_vlm.image_processor").ImageProcessor(
        base_input_size=(16, 16),
        patch_size=4,
        max_crops=2,
        overlap_margins=(0, 0),
        start_token_id=256,
        end_token_id=257,
        patch_token_id=258,
        column_token_id=259,
        min_pixels=64,
        max_pixels=1024,
    )
    return made, "<|image|>"


def bunny() -> tuple[Any, str]:
    module = home("llava_bunny.llava_bunny")
    made = tokens("<a>", "<pad>", bos_token="<a>")
    crop = {"height": 27, "width": 27}
    made.image_processor = module.ImageProcessor(size=(27, 27), crop_size=crop)
    return made, "<image>"


def phi4() -> tuple[Any, str]:
    from transformers import Siglip2ImageProcessorPil

    module = home("phi4_siglip.processing_phi4_siglip")
    images = Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16)
    made = tokens("<a>", "<pad>", bos_token="<a>")
    return module.Phi4SigLipProcessor(images, made), "<image>"


def kimi() -> tuple[Any, str]:
    module = home("kimi_vl.processing_kimi_vl")
    images = module.KimiVLImageProcessor(
        patch_size=4, in_token_limit=64, pad_input=True
    )
    names = ("<|media_start|>", "<|media_end|>", "<|media_pad|>", "<|pad|>")
    return module.KimiVLProcessor(images, tokens(*names)), "<|media_pad|>"


def locate() -> tuple[Any, str]:
    module = home("locateanything.processing_locateanything")
    kind = home("locateanything.image_processing_locateanything")
    images = kind.LocateAnythingImageProcessor(patch_size=4, in_token_limit=64)
    made = tokens("<img>", "</img>", "<IMG_CONTEXT>", "<|pad|>")
    return module.LocateAnythingProcessor(images, made), "<image-1>"


def paddle() -> tuple[Any, str]:
    module = home("paddleocr_vl.processing_paddleocr_vl")
    names = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|pad|>")
    made = tokens(*names)
    made.image_token, made.image_token_id = names[2], 258
    images = module.ImageProcessor(**_GRID)
    return module.PaddleOCRVLProcessor(images, made), f"{names[0]}{names[2]}{names[1]}"


def ernie() -> tuple[Any, str]:
    module = home("ernie4_5_moe_vl.processing_ernie4_5_moe_vl")
    names = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|pad|>")
    images = module.ImageProcessor(**_GRID)
    made = module.Ernie4_5_VLProcessor(images, tokens(*names))
    return made, f"{names[0]}<|image@placeholder|>{names[1]}"


def granite(name: str, kind: str, **more: Any) -> tuple[Any, str]:
    from transformers import LlavaNextImageProcessorPil

    processor = getattr(home(f"{name}.processing_{name}"), kind)
    made = processor(
        LlavaNextImageProcessorPil(**_ANYRES),
        tokens("<a>", "<b>", "<image>", "<|pad|>"),
        patch_size=4,
        vision_feature_select_strategy="full",
        **more,
    )
    return made, "<image>"


# By family: a maker of processor and image marker; the most images in a prompt.
MADE: dict[str, tuple[Callable[[], tuple[Any, str]], int]] = {
    "minicpmv4_6": (minicpm, 2),
    "molmo": (molmo, 1),
    "molmo2": (molmo2, 2),
    "jina_vlm": (jina, 1),
    "llava_bunny": (bunny, 1),
    "phi4_siglip": (phi4, 2),
    "kimi_vl": (kimi, 2),
    "locateanything": (locate, 2),
    "paddleocr_vl": (paddle, 1),  # several must have one size
    "ernie4_5_moe_vl": (ernie, 2),
    "granite_vision": (partial(granite, "granite_vision", "GraniteVisionProcessor"), 1),
    "granite4_vision": (
        partial(
            granite,
            "granite4_vision",
            "Granite4VisionProcessor",
            downsample_rate="2/4",
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_text_and_pictures_write_what_mlx_vlm_writes(name: str) -> None:
    import mlx_vlm
    from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer
    from mlx_vlm.utils import StoppingCriteria

    make, most = MADE[name]
    processor, marker = make()
    inner = getattr(processor, "tokenizer", processor)
    inner.stopping_criteria = StoppingCriteria([1 << 20], inner)
    processor.detokenizer = NaiveStreamingDetokenizer(inner)
    vlm = tiny(name).vlm
    target = VisionTarget(vlm, Processor(processor, vlm.config))
    made = SpeculativeGenerator(target, tokenizer(), draft="lookup", draft_length=2)
    for count in range(1, most + 1):
        images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:count])]
        text = " and ".join([marker] * count) + " what?"
        opened = [Image.open(io.BytesIO(image)) for image in images]
        answers = mlx_vlm.stream_generate(
            vlm, processor, text, opened, max_tokens=12, temperature=0.0
        )
        expected = [answer.token for answer in answers][:12]
        got = made.generate(
            text, images=images, max_tokens=12, stop_tokens=(), prefill_step_size=7
        )
        assert got.tokens[: len(expected)] == expected, count
