"""The images of a chat: data URLs, files under the allowed folder, fetched URLs.

A client could make the server ask other machines. So all addresses of a URL's host have
to be public, unless private ones are allowed. The host is resolved once, and the socket
is opened to an address that was checked. No redirect is followed, and no proxy of the
environment is used.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.vision.open_image import (
    ImageLimits,
    data_of_url,
    open_image,
)
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Limits, Settings

# The beginning of a file URL of this machine, with no host or with localhost
LOCAL = re.compile(r"file:(//(localhost)?/|(?!//))", re.IGNORECASE)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}
# A fetch goes on for a while after its client has left: this bounds open sockets.
_FETCHES = threading.BoundedSemaphore(16)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


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


def fetch_image(url: str, limits: Limits, *, private: bool = False) -> bytes:
    """Return the bytes behind a URL; `private`: its host need not be public.

    Raise InvalidRequestError for a URL or an answer that is not allowed.
    """
    deadline = time.monotonic() + limits.fetch_seconds
    try:
        target = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError) as error:  # such as an open bracket
        raise InvalidRequestError(
            f"The image's URL is malformed: {_shown(error)}."
        ) from error
    named = target.raw_host and not target.userinfo
    if target.scheme not in _PORTS or not named or not 0 < _port(target) < 65536:
        raise InvalidRequestError(
            "The image's URL cannot be fetched: it must be http:// or https:// with a "
            "host and without a user, and a port is at most 65535."
        )
    try:
        if not _FETCHES.acquire(timeout=limits.fetch_seconds):
            raise TimeoutError
        try:
            addresses = _addresses(target, private=private)
            fetching = _fetched(target, addresses, limits.image_bytes, deadline)
            return asyncio.run(fetching)
        finally:
            _FETCHES.release()
    except TimeoutError:
        why = f"it took longer than {limits.fetch_seconds:g} s"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
        why = _shown(error)
    raise InvalidRequestError(
        f"The image could not be fetched from its URL: {why}. Pass it as a data URL."
    )


def _shown(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".")[:80] or type(error).__name__


def _port(url: httpx2.URL) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


@cache
def _context() -> ssl.SSLContext:
    """Return a TLS context; to read the authorities takes a while."""
    return httpx2.create_ssl_context(trust_env=False)


def is_public(address: Address) -> bool:
    """Return whether an address, or the IPv4 address embedded in it, is public."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _addresses(url: httpx2.URL, *, private: bool) -> list[str]:
    host = url.raw_host.decode()
    try:
        infos = socket.getaddrinfo(host, _port(url), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"The image's host {host[:60]!r} cannot be resolved."
        ) from error
    addresses = [str(each[4][0]) for each in infos]
    if not private and not all(map(is_public, map(ipaddress.ip_address, addresses))):
        raise InvalidRequestError(
            f"The image's host {host[:60]!r} has an address that is not public, so "
            "nothing is fetched from it. Pass the image as a data URL."
        )
    return addresses


async def _fetched(
    url: httpx2.URL, addresses: Sequence[str], most: int, deadline: float
) -> bytes:
    """Return the bytes from the first address that answers."""
    host = {"Host": url.netloc.decode()}
    headers = {**host, "Accept": "image/*", "Accept-Encoding": "identity"}
    name = {"sni_hostname": url.raw_host.decode()}  # the certificate has to have it
    failed: Exception = httpx2.ConnectError("the host has no address")
    opened = httpx2.AsyncClient(verify=_context(), trust_env=False, timeout=None)
    async with asyncio.timeout(deadline - time.monotonic()), opened as client:
        for address in addresses:
            here = url.copy_with(host=address)
            request = client.build_request(
                "GET", here, headers=headers, extensions=name
            )
            try:
                answer = await client.send(request, stream=True)
            except httpx2.ConnectError as error:
                failed = error
            else:
                async with aclosing(answer):
                    return await _body(answer, most)
    raise failed


async def _body(answer: httpx2.Response, most: int) -> bytes:
    if answer.status_code != 200:
        moved = ", and redirects are not followed" if answer.is_redirect else ""
        raise InvalidRequestError(
            f"The image's URL was answered with status {answer.status_code}{moved}. "
            "Pass one that is answered with the image."
        )
    coding = answer.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise InvalidRequestError(
            f"The image's URL was answered in the encoding {coding[:20]!r}, which was "
            "not requested."
        )
    body, count = bytearray(), int(answer.headers.get("content-length", 0))
    if count <= most:
        async for piece in answer.aiter_raw():
            body += piece
            count = max(count, len(body))
            if count > most:
                break
    if count > most:
        raise InvalidRequestError(
            f"The image behind the URL has {count} bytes or more; at most {most} are "
            "allowed. Pass a smaller one."
        )
    return bytes(body)
