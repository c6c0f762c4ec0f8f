"""Fetching an image: requests, answers, and refusals before or after a request."""

import gzip
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Limits, Settings
from mlx_speculation.server.request.images import fetch_image, image_part, is_public

BODY = bytes(range(256)) * 8
LIMITS = Limits(image_bytes=4096, fetch_seconds=5.0)
fetch_local = partial(fetch_image, limits=LIMITS, private=True)


class Answers(BaseHTTPRequestHandler):
    """Answers each request according to its path."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[tuple[str, str | None]]]

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Host"]))
        kind = self.path.strip("/").partition("?")[0]
        getattr(self, f"_{kind}")()

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        named = {"Content_Length": str(len(body)), **headers}
        for name, value in named.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _whole(self) -> None:
        self._send(BODY)

    def _chunks(self, count: int = 4) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(count):
            self.wfile.write(b"200\r\n" + BODY[:512] + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _endless(self) -> None:
        self._chunks(1 << 20)

    def _large(self) -> None:
        self._send(b"", Content_Length=str(1 << 40))

    def _cut(self) -> None:
        self._send(BODY, Content_Length=str(len(BODY) + 1))
        self.close_connection = True

    def _gzip(self) -> None:
        self._send(gzip.compress(BODY), Content_Encoding="gzip")

    def _moved(self) -> None:
        self._send(b"", 302, Location="/whole")

    def _moved_to_no_name(self) -> None:
        self._send(b"", 302, Location=f"http://xn--{'a' * 20_000}.com/")

    def _none(self) -> None:
        self._send(b"", 404)

    def _slow(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "4096")
        self.end_headers()
        self._trickle()

    def _headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Header: ")
        self._trickle()

    def _trickle(self) -> None:
        for _ in range(1500):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.02)

    def _garbage(self) -> None:
        self.wfile.write(b"no http at all\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Report nothing: clients close connections midway in these tests."""


@contextmanager
def listening() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    class Own(Answers):
        requests: ClassVar[list[tuple[str, str | None]]] = []

    with Quiet(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", Own.requests
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with listening() as (address, _):
        yield address


@pytest.mark.parametrize("path", ["whole", "chunks", "whole?a=b&c", "whole#part"])
def test_an_answer_is_its_bytes(place: str, path: str) -> None:
    assert fetch_local(f"http://{place}/{path}") == (
        BODY if "whole" in path else BODY[:512] * 4
    )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("endless", "4[0-9]+ bytes or more"),
        ("large", "1099511627776 bytes or more"),
        ("cut", "without sending complete"),
        ("gzip", "encoding 'gzip'"),
        ("moved", "status 302, and redirects"),
        ("moved_to_no_name", "could not be fetched|status 302"),
        ("none", "status 404"),
        ("garbage", "could not be fetched"),
    ],
)
def test_an_answer_that_is_of_no_use_is_one_clear_error(
    place: str, path: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        fetch_local(f"http://{place}/{path}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("path", ["slow", "headers"])
def test_a_server_that_takes_its_time_is_left_at_the_deadline(
    place: str, path: str
) -> None:
    """Bytes that arrive now and then, in body or headers, do not move the deadline."""
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="longer than"):
        fetch_local(f"http://{place}/{path}", limits=Limits(fetch_seconds=0.2))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.org/a", "cannot be fetched"),
        ("file:///etc/passwd", "cannot be fetched"),
        ("gopher://127.0.0.1/", "cannot be fetched"),
        ("http:///a.png", "cannot be fetched"),
        ("http://user:word@example.org/a.png", "without a user"),
        ("http://example.org:0/a.png", "cannot be fetched"),
        ("http://93.184.216.34:65536/a.png", "at most 65535"),
        ("http://93.184.216.34:" + "9" * 25, "at most 65535|malformed"),
        ("http://example.org:port/a.png", "malformed"),
        ("http://xn--" + "a" * 300 + "/", "malformed|resolved"),
        ("http://xn--nxasmq6b." + "a." * 150 + "org/", "malformed|resolved"),
        ("http://" + "\u0939\u200d" * 30_000 + "/", "malformed"),
        ("http://[::1/a.png", "malformed"),
        ("http://127.0.0.1/a.png", "not public"),
        ("http://127.1/a.png", "not public"),
        ("http://2130706433/a.png", "not public"),
        ("http://0x7f000001/a.png", "not public"),
        ("http://0.0.0.0/a.png", "not public"),
        ("http://[::1]/a.png", "not public"),
        ("http://[::ffff:10.0.0.1]/a.png", "not public"),
        ("http://169.254.169.254/latest/meta-data", "not public"),
        ("http://localhost/a.png", "not public"),
        ("http://" + "a" * 300 + ".org/", "cannot be resolved"),
        ("http://..../", "cannot be resolved|not public"),
    ],
)
def test_where_nothing_is_asked(url: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        fetch_image(url, LIMITS)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("2002:5db8:d822::1", True),  # 6to4 form of the first address
        ("64:ff9b::5db8:d822", True),  # NAT64 form of the first address
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("127.8.8.8", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.1.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff0e::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::1", False),
        ("2001:0:7f00:1::1", False),  # Teredo
    ],
)
def test_public_addresses_are_distinguished_from_others(
    address: str, public: bool
) -> None:
    assert is_public(ipaddress.ip_address(address)) == public


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Answer each name look-up with the next list of addresses; return the names."""
    hosts: list[str] = []

    def resolve(host: str, port: int, *args: Any, **more: Any) -> Any:
        hosts.append(host)
        addresses = answers[min(len(hosts), len(answers)) - 1]
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return hosts


def test_all_addresses_of_a_name_have_to_be_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolving(monkeypatch, ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch_image("http://pictures.example/a.png", LIMITS)


def test_the_connection_goes_to_the_first_checked_address_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name is not resolved again, because it could lead elsewhere by then."""
    with listening() as (address, seen):
        port = address.partition(":")[2]
        hosts = resolving(monkeypatch, ["127.0.0.2", "127.0.0.1"], ["127.0.0.3"])
        url = f"http://pictures.example:{port}/whole"
        assert fetch_local(url) == BODY
    assert hosts == ["pictures.example"]
    assert seen == [("/whole", f"pictures.example:{port}")]


def test_the_deadline_includes_the_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*args: Any, **more: Any) -> Any:
        time.sleep(0.1)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listening() as (address, seen):
        url = f"http://pictures.example:{address.partition(':')[2]}/whole"
        with pytest.raises(InvalidRequestError, match="longer than"):
            fetch_local(url, limits=Limits(fetch_seconds=0.05))
    assert seen == []


def test_a_certificate_is_that_of_the_name(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A server that does not speak TLS gives the usual error."""
    named: list[str] = []
    wrap = ssl.SSLContext.wrap_bio

    def noting(self: ssl.SSLContext, *buffers: Any, **options: Any) -> Any:
        assert self.check_hostname
        assert self.verify_mode == ssl.CERT_REQUIRED
        name = options["server_hostname"]
        named.append(name if isinstance(name, str) else name.decode())
        return wrap(self, *buffers, **options)

    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", noting)
    resolving(monkeypatch, ["127.0.0.1"])
    port = place.partition(":")[2]
    with pytest.raises(InvalidRequestError, match="could not be fetched"):
        fetch_local(f"https://pictures.example:{port}/whole")
    assert named == ["pictures.example"]


def taken(url: str, settings: Settings) -> Any:
    return image_part(url, "here", settings, 0)["data"]


def test_a_server_fetches_where_it_is_switched_on(place: str) -> None:
    url = f"http://{place}/whole"
    off = Settings(names=("model",))
    fetching_ones = replace(off, fetch_images=True)
    private = replace(fetching_ones, fetch_private=True)
    with pytest.raises(ApiError, match="which is not allowed"):
        taken(url, off)
    with pytest.raises(ApiError, match=r"here: .* not public"):
        taken(url, fetching_ones)
    assert taken(url, private) == BODY
    assert taken(url.replace("http", "HTTP"), private) == BODY
    small = replace(private, limits=Limits(image_bytes=len(BODY) - 1))
    with pytest.raises(ApiError, match="bytes or more") as caught:
        taken(url, small)
    assert caught.value.status == 400
    with pytest.raises(ApiError, match="http:// or https://"):
        taken("ftp://example.org/a.png", private)
    with pytest.raises(ApiError, match="reads text only"):
        taken(url, replace(private, reads_images=False))
