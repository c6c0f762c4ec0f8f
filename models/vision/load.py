"""Loading a vision model with mlx-vlm, and preparing prompts with its processor."""

import copy
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_speculation.errors import (
    InvalidRequestError,
    MissingLibraryError,
    ModelFolderError,
    SpeculationError,
    UnsupportedModelError,
)
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.model_folder import (
    check_model_folder,
    model_folder,
    shortened,
)
from mlx_speculation.models.mtp.family import without_wrappers
from mlx_speculation.models.quantize import runs_on_linux_cpu, to_float32
from mlx_speculation.models.safetensors_layout import (
    CONSOLIDATED,
    INDEX,
    check_apart,
    check_index,
)
from mlx_speculation.models.token_ids import omitted_length
from mlx_speculation.models.vision.families import check_family
from mlx_speculation.models.vision.image_prompt import ImagePrompt
from mlx_speculation.models.vision.open_image import open_image
from mlx_speculation.models.vision.vision_target import VisionTarget
from mlx_speculation.shell_commands import install_command

_IMAGE_PARTS = ("image", "image_url", "input_image")
_OTHER_PARTS = ("audio", "input_audio", "video", "video_url")


def load_vision(
    path_or_repo: str | Path, *, trust_remote_code: bool = False
) -> tuple[VisionTarget, Any]:
    """Load a vision model with mlx-vlm, and mlx-lm's wrapper of its tokenizer.

    `path_or_repo` is a folder in mlx-vlm's layout, or the name of a repository.
    `trust_remote_code` lets code in the folder run. On a Linux CPU the weights are
    float32.

    Raises:
        MissingLibraryError: mlx-vlm is not installed.
        ModelFolderError: the folder is not a model, or mlx-vlm could not read it.
        UnsupportedModelError: the family is not supported.
        UnsupportedCacheError: the model has caches of an unknown kind.
    """
    check_model_folder(path_or_repo)
    _check_library(path_or_repo)
    folder = model_folder(path_or_repo)
    _check_files(folder)
    config = read_config(folder)
    file = config.get("model_file")
    if file is not None:
        raise ModelFolderError(
            f"{str(folder / 'config.json')!r} has model_file {file!r}: the model is "
            "built by code in its folder, whose caches and positions are not known "
            "here. Take a model of a family of mlx-vlm."
        )
    import mlx_vlm
    from mlx_vlm.utils import get_model_type

    check_family(get_model_type(config))  # before any weight is read
    more: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        vlm, processor = mlx_vlm.load(str(folder), **more)
        inner = getattr(processor, "tokenizer", processor)
        ends = inner.stopping_criteria.eos_token_ids
        template = getattr(processor, "chat_template", None)
        if isinstance(template, str):  # the template can be in a file of its own
            more["chat_template"] = template
        tokenizer = load_tokenizer(folder, more, eos_token_ids=ends)
    except Exception as error:
        raise ModelFolderError(
            f"mlx-vlm {mlx_vlm.__version__} could not load {str(path_or_repo)!r}: "
            f"{type(error).__name__}: {shortened(error)}. Check the folder with "
            "mlx_vlm.generate."
        ) from error
    if runs_on_linux_cpu():
        vlm = to_float32(vlm)
    target = VisionTarget(vlm, Processor(processor, vlm.config))
    target.omitted_length = omitted_length(config)
    return target, tokenizer


def _check_library(path_or_repo: str | Path) -> None:
    """Raise an error if mlx-vlm is missing.

    If the model reads text only, the error says that instead.
    """
    if find_spec("mlx_vlm") is not None:
        return
    here = Path(path_or_repo).expanduser()
    if here.is_dir() and "vision_config" not in read_config(here):
        raise UnsupportedModelError(
            f"{str(path_or_repo)!r} was requested with vision, but its config.json has "
            "no vision_config: the model reads text only. Name a vision model, or "
            "leave images out."
        )
    raise MissingLibraryError(
        f"{str(path_or_repo)!r} was requested with vision, which needs mlx-vlm. "
        f"Install it with: {install_command('vision')}"
    )


def _check_files(folder: Path) -> None:
    """Refuse a folder of which mlx-vlm would read wrong or too few files.

    mlx-vlm ignores missing files of an index, and without an index reads all files.
    """
    check_index(folder, lambda name: without_wrappers(name).startswith("mtp."))
    if not (folder / INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        check_apart([each for each in files if each.name != CONSOLIDATED])


def tokenizer_of(processor: Any) -> TokenizerWrapper:
    """Return mlx-lm's wrapper of a processor's tokenizer, with mlx-vlm's end tokens."""
    inner = getattr(processor, "tokenizer", processor)
    ends = getattr(inner, "stopping_criteria", None)
    ids = None if ends is None else ends.eos_token_ids
    return TokenizerWrapper(inner, eos_token_ids=ids)


class Processor:
    """Makes prompts from pictures and a text, or from pictures and messages.

    `processor` is the one that `mlx_vlm.load` returns.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor, self._config = processor, config

    def prompt(
        self, prompt: Any, images: Sequence[Any], template: Mapping[str, Any]
    ) -> ImagePrompt:
        """Return a prompt with images, from text or messages.

        A text needs the family's own marker for each image. In messages the first
        images belong to the image parts, and further images to the user's last message.
        `images` are sources for `open_image`. `template` has keywords for the chat
        template.

        Raises:
            InvalidRequestError: an image cannot be read, the prompt is neither text nor
                messages, or the template or the processor refuses it.
        """
        from mlx_vlm.prompt_utils import apply_chat_template
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        if not isinstance(prompt, str) and not _are_messages(prompt):
            raise InvalidRequestError(
                f"{len(images)} images were passed with a prompt that is neither text "
                "nor messages. Pass messages, a text with the family's marker for each "
                "image, or an ImagePrompt."
            )
        pictures = [open_image(each) for each in images]
        try:
            if not isinstance(prompt, str):
                _check_parts(prompt, len(images))
                prompt = apply_chat_template(
                    self._processor,
                    self._config,
                    [dict(message) for message in prompt],
                    num_images=len(images),
                    **template,
                )
            kind = self._config.model_type
            special = should_add_special_tokens(kind, self._processor)
            inputs = prepare_inputs(
                usable(self._processor, self._config),
                images=pictures,
                prompts=prompt,
                image_token_index=getattr(self._config, "image_token_index", None),
                add_special_tokens=special,
            )
            return ImagePrompt.of({n: _array(v) for n, v in inputs.items()})
        except SpeculationError:
            raise
        except Exception as error:  # templates and processors raise errors of any kind
            raise InvalidRequestError(
                f"The processor refused a prompt with {len(images)} images: "
                f"{type(error).__name__}: {shortened(error)}. A text has one marker "
                "for each image; messages get theirs from the template."
            ) from error


def usable(processor: Any, config: Any) -> Any:
    """Return a processor that works with transformers 5.24.

    In mlx-vlm 0.7.10 the processor of llava passes `padding` to its tokenizer, and also
    to its image processor, which refuses the keyword. Remove this function when mlx-vlm
    no longer does so.
    """
    if getattr(config, "model_type", None) != "llava":
        return processor
    result = copy.copy(processor)  # the caller's processor must not change
    result.image_processor = _WithoutPadding(processor.image_processor)
    return result


class _WithoutPadding:
    """An image processor without the keyword `padding`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: Any, *, padding: Any = None, **keywords: Any) -> Any:
        return self._inner(images, **keywords)


def _array(value: Any) -> Any:
    """Return a processor's output as an array or a list of arrays; None: it is text."""
    if value is None or isinstance(value, mx.array):
        return value
    if isinstance(value, str) or (isinstance(value, list) and _all_text(value)):
        return None
    if isinstance(value, list) and any(_holds_arrays(each) for each in value):
        return [_array(each) for each in value]
    return mx.array(value)


def _all_text(values: list[Any]) -> bool:
    return len(values) > 0 and all(isinstance(each, str) for each in values)


def _holds_arrays(value: Any) -> bool:
    nested = isinstance(value, list) and any(_holds_arrays(each) for each in value)
    return nested or hasattr(value, "shape")


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(
        isinstance(each, Mapping) and "role" in each for each in prompt
    )


def _check_parts(messages: Sequence[Mapping[str, Any]], images: int) -> None:
    """Refuse more image parts than images, and parts of other media."""
    kinds = [
        part.get("type")
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping)
    ]
    other = next((kind for kind in kinds if kind in _OTHER_PARTS), None)
    if other is not None:
        raise InvalidRequestError(
            f"A message has a part of type {other!r}, but only text and images can be "
            "read. Leave it out."
        )
    parts = sum(kind in _IMAGE_PARTS for kind in kinds)
    if parts > images:
        raise InvalidRequestError(
            f"The messages have {parts} image parts, but {images} images were passed. "
            "Pass an image for each."
        )
