"""Pictures from paths, bytes and data URLs; nothing is fetched.

Limits are checked before an image is decoded, since a small file can claim billions of
pixels.
"""

import base64
import binascii
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.errors import InvalidRequestError

# Formats that cannot contain code or refer to other files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SHOWN = 60  # characters of a source in a message


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of an image."""

    file_bytes: int = 32 << 20  # the size of the file
    pixels: int = 40_000_000  # of 3 bytes each when decoded


USUAL_LIMITS = ImageLimits()


def open_image(source: Any, limits: ImageLimits = USUAL_LIMITS) -> Any:
    """Return a picture of Pillow in RGB, rotated by its EXIF orientation.

    `source` is a path, bytes, a data URL, or a picture of Pillow.

    Raises:
        InvalidRequestError: the source is no image, is in a format not in `FORMATS`, is
            truncated or too large, has several frames, or is a URL that would have to
            be fetched.
    """
    from PIL import Image, ImageOps

    name = _named(source)
    if isinstance(source, Image.Image):
        _check_pixels(source, name, limits)
        return ImageOps.exif_transpose(source).convert("RGB")
    data = _bytes_of(source, name, limits)
    _check_bytes(len(data), name, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and sizes checked below
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(picture, name, limits)
            picture.load()
            return ImageOps.exif_transpose(picture).convert("RGB")
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders raise errors of many kinds
        raise InvalidRequestError(
            f"The image {name} cannot be read: {_cut(str(error) or repr(error))}. Pass "
            f"a whole file of one of {', '.join(FORMATS)}."
        ) from error


def data_of_url(url: str, limits: ImageLimits = USUAL_LIMITS) -> bytes:
    """Return the bytes of a data URL such as `data:image/png;base64,iVBOR...`.

    Raises:
        InvalidRequestError: the URL is malformed, not base64, no image or too large.
    """
    head, comma, body = url.partition(",")
    kind, *more = head.removeprefix("data:").lower().split(";")
    if not comma or "base64" not in more or not kind.startswith("image/"):
        raise InvalidRequestError(
            f"The data URL begins with {_cut(head)!r}, but 'data:image/...;base64,' is "
            "needed."
        )
    _check_bytes(len(body) * 3 // 4, "of the data URL", limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"The data URL {_cut(head)!r} is not base64: {_cut(str(error))}."
        ) from error


def _bytes_of(source: Any, name: str, limits: ImageLimits) -> bytes:
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str) and source.startswith("data:"):
        return data_of_url(source, limits)
    if isinstance(source, str) and "://" in source:
        raise InvalidRequestError(
            f"The image {name} is a URL, but URLs are not fetched. Pass its bytes."
        )
    if not isinstance(source, str | Path):
        raise InvalidRequestError(
            f"An image is a {type(source).__name__}, but has to be a path, bytes, a "
            "data URL or a picture of Pillow."
        )
    path = Path(source).expanduser()
    try:
        if not path.is_file():  # such as a device or a pipe
            raise FileNotFoundError("there is no such file")
        _check_bytes(path.stat().st_size, name, limits)
        with path.open("rb") as file:
            return file.read(limits.file_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(
            f"The image {name} cannot be opened: {_cut(why)}."
        ) from error


def _check_bytes(count: int, name: str, limits: ImageLimits) -> None:
    if count > limits.file_bytes:
        raise InvalidRequestError(
            f"The image {name} has {count} bytes; at most {limits.file_bytes} are "
            "allowed. Pass a smaller one."
        )


def _check_pixels(picture: Any, name: str, limits: ImageLimits) -> None:
    """Refuse a picture before its pixels are decoded."""
    across, down = picture.size
    if across * down > limits.pixels or not across * down:
        raise InvalidRequestError(
            f"The image {name} has {across} x {down} pixels; 1 to {limits.pixels} "
            "are allowed. Pass one of an allowed size."
        )
    frames = getattr(picture, "n_frames", 1)
    if frames > 1:
        raise InvalidRequestError(
            f"The image {name} has {frames} frames; only one is allowed. Pass a still."
        )


def _named(source: Any) -> str:
    if isinstance(source, str) and not source.startswith("data:"):
        return repr(_cut(source))
    if isinstance(source, Path):
        return repr(_cut(str(source)))
    return f"given as {type(source).__name__}"


def _cut(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
