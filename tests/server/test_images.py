"""Chats with images over HTTP: their texts, and refused images."""

import base64
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.server import Server
from support.models.tiny_vision import WITHOUT_MLX_VLM
from support.models.vision_folders import picture, vision_folder
from support.processes import servers
from support.processes.servers import NAME, Answer, Listening, client_of, serving

PICTURES = [picture(), picture(40, 16, seed=2)]


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def message(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "And?"}]}


def body(*urls: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [message(*urls)], "max_tokens": 8, **more}


def post(server: Listening, request: Any) -> Answer:
    return servers.post(server, request, path="/v1/chat/completions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("vision") / "qwen3_vl")


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image, and with links that lead out of the folder or nowhere."""
    inside = tmp_path_factory.mktemp("allowed")
    beside = tmp_path_factory.mktemp("beside")
    (inside / "in ner").mkdir()
    (inside / "in ner" / "a.png").write_bytes(PICTURES[0])
    (beside / "b.png").write_bytes(PICTURES[0])
    (inside / "out.png").symlink_to(beside / "b.png")
    (inside / "to").symlink_to(beside)
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "text.png").write_text("no image")
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.fixture(scope="module")
def server(folder: Path, allowed: Path) -> Iterator[Server]:
    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator.from_pretrained(
            folder, vision=True, draft="lookup", draft_length=2, prefix_cache=prefixes
        )

    limits = {"images": 2, "image_bytes": 4096, "image_pixels": 900}
    with serving(
        make,
        draft="lookup",
        prefixes=PrefixCache(1 << 26),
        image_folder=allowed,
        limits=limits,
    ) as made:
        yield made


@cache
def expected(folder: Path, *images: bytes) -> str:
    plain = SpeculativeGenerator.from_pretrained(folder, vision=True)
    parts = [{"type": "image"}] * len(images)
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "And?"}]}
    return plain.generate([turn], images=images, max_tokens=8).text


@WITHOUT_MLX_VLM
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_chat_with_images_is_the_text_of_the_library(
    server: Server, folder: Path, count: int
) -> None:
    images = PICTURES[:count]
    with client_of(server) as client:
        for stream in (False, True):
            request: Any = body(*map(url, images), stream=stream)
            answer: Any = client.chat.completions.create(**request)
            if stream:
                deltas = [chunk.choices[0].delta.content for chunk in answer]
                text = "".join(delta or "" for delta in deltas)
            else:
                text = answer.choices[0].message.content
            assert text == expected(folder, *images)


@WITHOUT_MLX_VLM
def test_a_file_of_the_allowed_folder_is_its_bytes(
    server: Server, allowed: Path
) -> None:
    named = f"file://{allowed}/in%20ner/a.png"
    answers = [
        post(server, body(each, seed=1)).json["choices"]
        for each in (named, url(PICTURES[0]))
    ]
    assert answers[0] == answers[1]


@WITHOUT_MLX_VLM
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("https://example.org/a.png", "not allowed"),
        ("http://127.0.0.1:1/a.png", "not allowed"),
        ("ftp://example.org/a.png", "not allowed"),
        ("a.png", "not allowed"),
        ("file://example.org/a.png", "not allowed"),
        ("file:///etc/passwd", "outside"),
        ("file:///../../../etc/passwd", "outside"),
        ("{allowed}/../x.png", "outside"),
        ("{allowed}/%2e%2e/x.png", "outside"),
        ("{allowed}/out.png", "outside"),
        ("{allowed}/to/b.png", "outside"),
        ("{allowed}/loop", "cannot be read|names no file"),
        ("{allowed}/pipe.png", "names no file"),
        ("{allowed}/none.png", "names no file"),
        ("{allowed}/a%00b.png", "cannot be read|names no file"),
        ("{allowed}", "names no file"),
        ("{allowed}/text.png", "cannot be read"),
        (url(b"no image"), "cannot be read"),
        (url(PICTURES[0][:150]), "cannot be read"),
        (url(PICTURES[0], "text/html"), "data:image"),
        ("data:image/png;base64,$$$", "not base64"),
        (url(b"\0" * 5000), "at most 4096"),
        (url(picture(48, 20)), "48 x 20 pixels"),
        (url(picture(224, 1)), "aspect ratio"),
        ("", "not allowed"),
    ],
)
def test_an_image_that_is_none_is_one_error_and_the_server_stays_up(
    server: Server, allowed: Path, source: str, why: str
) -> None:
    sent = source.format(allowed=f"file://{allowed}") if "{" in source else source
    error = post(server, body(sent)).refused(400)
    assert any(each in error["message"] for each in why.split("|")), error
    assert "passwd" not in error["message"] or "etc/passwd" in sent
    assert post(server, body(max_tokens=1)).status == 200


@WITHOUT_MLX_VLM
def test_parts_of_other_kinds_and_too_many_images_are_refused(server: Server) -> None:
    many = body(*[url(PICTURES[0])] * 3)
    assert "2 images" in post(server, many).refused(400)["message"]
    for part in (
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": url(b"")}},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image_url", "image_url": ["a"]},
        "text",
        None,
    ):
        request = body(messages=[{"role": "user", "content": [part]}])
        post(server, request).refused(400)
    assert post(server, body(url(PICTURES[0]))).status == 200


def test_a_text_model_refuses_images() -> None:
    with serving() as text_only:
        for image in (url(PICTURES[0]), "file:///etc/passwd", "http://here/x.png"):
            error = post(text_only, body(image)).refused(400)
            assert "reads text only" in error["message"]


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body[:300]
    body = answer.json
    blocks = body.get("content") or body["output"][0]["content"]
    return "".join(block["text"] for block in blocks)


@WITHOUT_MLX_VLM
def test_images_by_messages_and_responses_are_those_of_a_chat(
    server: Server, folder: Path
) -> None:
    data = base64.b64encode(PICTURES[0]).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "And?"}]
    turn = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8}
    assert text_of(servers.post(server, turn, path="/v1/messages")) == expected(
        folder, PICTURES[0]
    )
    parts = [
        {"type": "input_image", "image_url": url(PICTURES[0]), "detail": "auto"},
        {"type": "input_text", "text": "And?"},
    ]
    items = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8}
    assert text_of(servers.post(server, items, path="/v1/responses")) == expected(
        folder, PICTURES[0]
    )


@WITHOUT_MLX_VLM
def test_an_image_that_a_tool_returns_stands_after_the_results(
    server: Server,
) -> None:
    data = base64.b64encode(PICTURES[0]).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    call = {"type": "tool_use", "id": "1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1"}
    result["content"] = [{"type": "image", "source": source}]  # type: ignore[assignment]
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    request = {"messages": turns, "max_tokens": 8}
    by_messages = text_of(servers.post(server, request, path="/v1/messages"))
    image = [{"type": "input_image", "image_url": url(PICTURES[0])}]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "1", "name": "Read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": image},
    ]
    body = {"input": items, "max_output_tokens": 8}
    assert text_of(servers.post(server, body, path="/v1/responses")) == by_messages
