"""The images of a chat: data URLs, files under the allowed folder, fetched URLs.

A client could make the server ask other machines. So all addresses of a URL's host have
to be public, unless private ones are allowed. The host is resolved once, and the socket
is opened to an address that was checked. No redirect is followed, and no proxy of the
environment is used.
"""

import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

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
    parts = _checked_url(url)
    deadline = time.monotonic() + limits.fetch_seconds
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        addresses = _addresses(host, port, private=private)
        with closing(HTTPConnection(parts.netloc)) as connection:
            connection.sock = opened = _connected(addresses, port, deadline)
            if parts.scheme == "https":
                opened.settimeout(_left(deadline))
                opened = _context().wrap_socket(opened, server_hostname=host)
                connection.sock = opened
            # The timeout of a read never expires if a byte comes now and then.
            cut = threading.Timer(_left(deadline), _cut, [opened])
            cut.daemon = True
            cut.start()
            try:
                result = _body(connection, parts, limits.image_bytes)
            finally:
                cut.cancel()
        if time.monotonic() >= deadline:  # a cut connection looks like an ended answer
            raise TimeoutError
        return result
    except InvalidRequestError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        text = " ".join(str(error).split()).rstrip(".")
        why = text[:80] or type(error).__name__
        if time.monotonic() >= deadline:
            why = f"it took longer than {limits.fetch_seconds:g} s"
        raise InvalidRequestError(
            f"The image could not be fetched from its URL: {why}. Pass it as a data "
            "URL."
        ) from error


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


def _checked_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # an invalid port, or an open bracket
        raise InvalidRequestError(f"The image's URL is malformed: {error}.") from error
    if parts.scheme not in _PORTS or not named or "@" in parts.netloc:
        raise InvalidRequestError(
            "The image's URL cannot be fetched: it must be http:// or https:// with a "
            "host and without a user."
        )
    return parts


def _addresses(host: str, port: int, *, private: bool) -> list[Address]:
    try:
        name = host.encode("idna").decode()
        result = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"The image's host {host[:60]!r} cannot be resolved."
        ) from error
    addresses = [ipaddress.ip_address(each[4][0]) for each in result]
    if not private and not all(is_public(each) for each in addresses):
        raise InvalidRequestError(
            f"The image's host {host[:60]!r} has an address that is not public, so "
            "nothing is fetched from it. Pass the image as a data URL."
        )
    return addresses


def _connected(addresses: list[Address], port: int, deadline: float) -> socket.socket:
    """Open a connection to the first address that answers."""
    error: OSError = TimeoutError()
    for address in addresses:
        try:
            return socket.create_connection((str(address), port), _left(deadline))
        except OSError as failed:
            error = failed
    raise error


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _context() -> ssl.SSLContext:
    """Return a TLS context with the authorities of certifi, or of the system."""
    with suppress(ImportError):
        import certifi

        return ssl.create_default_context(cafile=certifi.where())
    return ssl.create_default_context()


def _cut(opened: socket.socket) -> None:
    with suppress(OSError):  # the connection has ended
        socket.socket.shutdown(opened, socket.SHUT_RDWR)  # below TLS


def _body(connection: HTTPConnection, parts: SplitResult, most: int) -> bytes:
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    connection.request("GET", path, headers={**headers, "Connection": "close"})
    with connection.getresponse() as answer:
        if answer.status != 200:
            moved = answer.status // 100 == 3
            raise InvalidRequestError(
                f"The image's URL was answered with status {answer.status}"
                f"{', and redirects are not followed' if moved else ''}. Pass one that "
                "is answered with the image."
            )
        coding = answer.headers.get("Content-Encoding", "identity").lower()
        if coding != "identity":
            raise InvalidRequestError(
                f"The image's URL was answered in the encoding {coding[:20]!r}, which "
                "was not requested."
            )
        body = b"" if (answer.length or 0) > most else answer.read(most + 1)
        count = len(body) + (answer.length or 0)
        if count > most:
            raise InvalidRequestError(
                f"The image behind the URL has {count} bytes or more; at most {most} "
                "are allowed. Pass a smaller one."
            )
        if answer.length:  # bytes of Content-Length that have not come
            raise HTTPException(f"{answer.length} bytes are missing")
    return body
