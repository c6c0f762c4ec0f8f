"""Fetching of images that a client names by URL, if the server allows it.

A client could make the server ask other machines. So all addresses of a host have to be
public, unless private ones are allowed. The host is resolved once, and the socket is
opened to an address that was checked. No redirect is followed, and no proxy of the
environment is used. Bytes count while they are read, and seconds from the look-up on.
"""

import ipaddress
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from urllib.parse import SplitResult, urlsplit

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.config import Limits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}
_CHUNK = 1 << 16  # bytes
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def fetch_image(url: str, limits: Limits, *, private: bool = False) -> bytes:
    """Return the bytes behind a URL; `private`: its host need not be public.

    Raise InvalidRequestError for a URL or an answer that is not allowed.
    """
    parts = _checked_url(url)
    deadline = time.monotonic() + limits.fetch_seconds
    try:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        addresses = _addresses(host, port, private=private)
        with ExitStack() as stack:
            opened = stack.enter_context(_connected(addresses, port, deadline))
            if parts.scheme == "https":
                opened.settimeout(_left(deadline))
                secured = _context().wrap_socket(opened, server_hostname=host)
                opened = stack.enter_context(secured)
            # The timeout of a read never expires if a byte comes now and then.
            cut = threading.Timer(_left(deadline), _cut, [opened])
            cut.daemon = True
            cut.start()
            stack.callback(cut.cancel)
            result = _body(opened, parts, limits.image_bytes)
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
    """Return the parts of a URL; raise if it may not be fetched."""
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
    """Return the addresses of a host; raise if one is not allowed."""
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


def _body(opened: socket.socket, parts: SplitResult, most: int) -> bytes:
    """Send the request, check the answer, and return its body, at most `most` bytes."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    result = bytearray()
    with closing(HTTPConnection(parts.netloc)) as connection:
        connection.sock = opened  # so that it does not connect by itself
        connection.request("GET", path, headers={**headers, "Connection": "close"})
        with connection.getresponse() as answer:
            _check_head(answer.status, answer.headers.get("Content-Encoding"))
            while (count := len(result) + (answer.length or 0)) <= most:
                if not (chunk := answer.read1(_CHUNK)):
                    break
                result += chunk
            else:
                raise InvalidRequestError(
                    f"The image behind the URL has {count} bytes or more; at most "
                    f"{most} are allowed. Pass a smaller one."
                )
            if answer.length:  # bytes of Content-Length that have not come
                raise HTTPException(f"{answer.length} bytes are missing")
    return bytes(result)


def _check_head(status: int, coding: str | None) -> None:
    if status != 200:
        also = ", and redirects are not followed" if status // 100 == 3 else ""
        raise InvalidRequestError(
            f"The image's URL was answered with status {status}{also}. Pass one that "
            "is answered with the image."
        )
    if coding is not None and coding.lower() != "identity":
        raise InvalidRequestError(
            f"The image's URL was answered in the encoding {coding[:20].lower()!r}, "
            "which was not requested."
        )
