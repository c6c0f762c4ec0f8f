"""Images from outside: invalid or too large data raises one clear error."""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision.open_image import (
    FORMATS,
    ImageLimits,
    data_of_url,
    open_image,
)
from support.models.vision_folders import picture


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_a_picture_is_the_same_from_everywhere(tmp_path: Path) -> None:
    data = picture()
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    expected = Image.open(io.BytesIO(data)).convert("RGB").tobytes()
    opened = Image.open(io.BytesIO(data))
    sources: list[Any] = [data, str(path), path, url(data), opened]
    for source in sources:
        assert open_image(source).tobytes() == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_known_formats_are_read(kind: str) -> None:
    assert open_image(picture(kind=kind)).size == (24, 16)


def test_a_picture_is_turned_as_its_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = io.BytesIO()
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    assert open_image(file.getvalue()).size == (10, 30)


def other(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    return file.getvalue()


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (i * 90, 0, 0)) for i in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """Return a small PNG whose header claims width x height pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)

    def chunk(body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body) - 4)
            + body
            + struct.pack(">I", zlib.crc32(body))
        )

    return b"\x89PNG\r\n\x1a\n" + chunk(head) + chunk(data) + chunk(b"IEND")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"", "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
        (picture()[:200], "cannot be read"),
        (picture(kind="JPEG")[:300], "cannot be read"),
        (picture()[:60] + b"\0" * 60 + picture()[120:], "cannot be read"),
        (other("TIFF"), "cannot be read"),
        (other("PDF"), "cannot be read"),
        (animated(), "3 frames"),
        (claiming(8_000, 8_000), "8000 x 8000 pixels"),
        (claiming(60_000, 60_000), "3600000000 pixels"),
        (claiming(1_000_000_000, 4), "4000000000 pixels"),
        (claiming(40, 40), "cannot be read"),
        ("https://example.org/a.png", "URLs are not fetched"),
        ("file:///etc/passwd", "URLs are not fetched"),
        ("/no/such/file.png", "no such file"),
        ("/dev/zero", "no such file"),
        ("a\0b", "cannot be opened"),
        (url(b"text", "text/html"), "data:image"),
        ("data:image/png,abc", "data:image"),
        ("data:image/png;base64,$$$$", "not base64"),
        ("data:image/png;base64", "data:image"),
        (url(b"no image"), "cannot be read"),
        (7, "is a int"),
        (None, "is a NoneType"),
    ],
)
def test_what_is_no_image_is_one_clear_error(source: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        open_image(source)
    assert len(str(caught.value)) < 400


def test_limits_hold_before_anything_is_decoded(tmp_path: Path) -> None:
    data = picture()
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    small = ImageLimits(file_bytes=len(data) - 1)
    for source in (data, path, url(data)):
        with pytest.raises(InvalidRequestError, match="bytes; at most"):
            open_image(source, small)
    few = ImageLimits(pixels=24 * 16 - 1)
    for whole in (data, path, url(data), Image.open(io.BytesIO(data))):
        with pytest.raises(InvalidRequestError, match="24 x 16 pixels"):
            open_image(whole, few)
    assert open_image(data, ImageLimits(len(data), 24 * 16)).size == (24, 16)


def test_a_data_url_gives_its_bytes() -> None:
    assert data_of_url(url(b"abc", "image/webp")) == b"abc"
