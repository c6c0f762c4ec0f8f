"""The images of a chat: data URLs, files under the allowed folder, fetched URLs."""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision.open_image import (
    ImageLimits,
    data_of_url,
    open_image,
)
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.fetch_image import fetch_image

# The scheme of a file of this machine; no host but localhost
LOCAL = re.compile(r"file:(//(localhost)?/|(?!//))", re.IGNORECASE)


def image_part(
    url: str,
    where: str,
    settings: Settings,
    count: int,  # number of images before it
) -> dict[str, Any]:
    """Return the image at `where` as a part of a content, not decoded yet.

    Raise ApiError for an image that is one too many, too large or not allowed.
    """
    limits = settings.limits
    if not settings.reads_images:
        raise invalid(
            f"{where} is an image, but the model served here reads text only. Leave "
            "images out, or serve a vision model.",
            where,
        )
    if count >= limits.images:
        raise invalid(
            f"A request may have at most {limits.images} images. Send fewer, or start "
            "the server with a larger --max-images.",
            "messages",
        )
    try:
        if url.startswith("data:"):
            data = data_of_url(url, _limits(settings))
        elif settings.fetch_images and url.lower().startswith(("http://", "https://")):
            data = fetch_image(url, limits, private=settings.fetch_private)
        else:
            data = _read(url, where, settings)
    except InvalidRequestError as error:
        raise invalid(f"{where}: {error}", where) from error
    return {"type": "image", "data": data}


def opened(images: Sequence[bytes], settings: Settings) -> tuple[Any, ...]:
    """Decode the bytes of images, and return pictures."""
    result: list[Any] = []
    try:
        for data in images:
            result.append(open_image(data, _limits(settings)))
    except InvalidRequestError as error:
        place = f"Image {len(result) + 1} of {len(images)}"
        raise invalid(f"{place}: {error}", "messages") from error
    return tuple(result)


def _limits(settings: Settings) -> ImageLimits:
    return ImageLimits(settings.limits.image_bytes, settings.limits.image_pixels)


def _read(url: str, where: str, settings: Settings) -> bytes:
    """Return the bytes of a file under the allowed folder."""
    folder = settings.image_folder
    if folder is None or not LOCAL.match(url):
        known = {
            "a data URL": True,
            "a file:// URL under the allowed folder": folder is not None,
            "an http:// or https:// URL": settings.fetch_images,
        }
        allowed = ", or ".join(kind for kind, may in known.items() if may)
        raise invalid(
            f"{where} is {url[:60]!r}, which is not allowed. It must be {allowed}.",
            where,
        )
    try:
        root = folder.resolve()
        path = (root / unquote(urlsplit(url).path)).resolve()  # follows links
        inside = path.is_relative_to(root)
        if inside and path.is_file():  # no device, no pipe
            with path.open("rb") as file:
                return file.read(settings.limits.image_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise invalid(f"{where} names a file that cannot be read.", where) from error
    kind = "no file in" if inside else "a file outside of"
    raise invalid(f"{where} names {kind} the allowed folder.", where)
