"""Contents of messages as pydantic models: the parts and blocks of all APIs.

Blocks that this server cannot use, such as `server_tool_use`, become empty texts, so
that other blocks keep their index.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.request.models import (
    DEEPEST,
    Loose,
    Object,
    RequestModel,
)
from mlx_speculation.server.request.tools import Named

EMPTY = {"type": "text", "text": ""}
DROPPED = (
    *("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_listing"),
    *("container_upload", "tool_addition", "tool_removal", "fallback"),
)
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def _blocks(given: Any) -> Any:
    if isinstance(given, str):
        return [{**EMPTY, "text": given}]
    if not isinstance(given, list):
        return given
    return [_block(each) if isinstance(each, Mapping) else each for each in given]


def _block(given: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = str(given.get("type"))
    if kind == "compaction":  # a summary of earlier turns; null: none was made
        return {**EMPTY, "text": given.get("content") or ""}
    dropped = kind in DROPPED or kind.endswith("_tool_result")
    return EMPTY if dropped else given


def _arguments(given: Any) -> Any:
    """Return the arguments of an earlier call as an object, empty if there are none."""
    if not isinstance(given, str):
        return given
    try:
        read = parse_json(given, deepest=DEEPEST) if given.strip() else None
        json.dumps(read, ensure_ascii=False).encode()
    except (JsonFlawError, UnicodeEncodeError) as error:
        raise ValueError(f"it {error}") from error
    return {} if read is None else read


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


class TextBlock(RequestModel):
    """A text, a refusal, or a text of reasoning."""

    type: Literal[
        "text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"
    ]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ImageBlock(RequestModel):
    """An image by its URL; bytes in base64 become a data URL."""

    type: Literal["image_url", "input_image", "image"]
    url: str

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Set `url` from the field in which the API has it."""
        given = values.get("image_url", values.get("source"))
        if isinstance(given, Mapping) and given.get("type") == "base64":
            kind = given.get("media_type")
            if kind not in IMAGE_TYPES:
                raise ValueError(f"media_type has to be one of {IMAGE_TYPES}")
            given = {"url": f"data:{kind};base64,{given.get('data')}"}
        values["url"] = given.get("url") if isinstance(given, Mapping) else given


class ReferenceBlock(RequestModel):
    """A deferred tool that may be called from here on."""

    type: Literal["tool_reference"]
    tool_name: str


class DocumentBlock(RequestModel):
    """A document of plain text, or a result of a search."""

    type: Literal["document", "search_result"]
    title: Loose = ""
    source: Loose = ""
    content: "Content" = Field([])

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Set the `content` of a document from its `source`."""
        source = values.get("source")
        if values.get("type") == "document":
            source = source if isinstance(source, Mapping) else {}
            field = {"text": "data", "content": "content"}.get(str(source.get("type")))
            values["content"] = source.get(field)
            if values["content"] is None:
                raise ValueError("only plain text is supported, no PDFs and no files")


class ThinkingBlock(RequestModel):
    """Reasoning of an earlier turn."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""


class Called(Named):
    """The function, or the custom tool, of a call in the history."""

    name: str
    arguments: Arguments = Field({})

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Take the text for a custom tool as the argument "input"."""
        if "input" in values:
            values["arguments"] = {"input": str(values["input"])}

    def block(self, id: str) -> "UseBlock":
        """Return the call as a block, with the tool's name in the chat template."""
        return UseBlock(id=id, name=self.flat, input=self.arguments)


class UseBlock(RequestModel):
    """A tool call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Object = Field({})


class ResultBlock(RequestModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: "Content" = Field([])
    is_error: bool = False


Block = (
    TextBlock
    | ImageBlock
    | ReferenceBlock
    | DocumentBlock
    | ThinkingBlock
    | UseBlock
    | ResultBlock
)
Blocks = Sequence[Block]
Content = Annotated[
    list[Annotated[Block, Field(discriminator="type")]], BeforeValidator(_blocks)
]
