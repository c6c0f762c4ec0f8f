"""The grammar of one tool call, as chat templates of the Hermes kind teach it.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Other kinds of calls, such as Python or XML, have no grammar here.
"""

import json
from collections.abc import Sequence
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.schemas.compilers import LARK

# As the templates write it, so that the text is what the model was trained on.
SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def call_grammar(
    functions: Sequence[dict[str, Any]],
    tokenizer: Any,
    parser: Any,  # of the tokenizer's calls
    marks: tuple[str, str],  # before and after a call
) -> str:
    """Return the grammar of a call of one of these functions, for `SchemaCompilers`.

    Raises:
        ApiError: the calls are of another kind.
    """
    module = getattr(parser, "__module__", "")
    if not module.endswith(".json_tools"):
        raise invalid(
            "tool_choice asks for a call, and the model's chat template writes its "
            f"calls as {module.rpartition('.')[2]!r}: only calls in JSON can be "
            "forced. Leave tool_choice out.",
            "tool_choice",
        )
    schema = {"x-guidance": SPACING, "anyOf": [_call(each) for each in functions]}
    begin, end = (_literal(text, tokenizer) for text in marks)
    grammar = f'start: {begin} "\\n" call "\\n" {end}\ncall: %json {json.dumps(schema)}'
    return LARK + grammar


def _call(function: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call."""
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _literal(text: str, tokenizer: Any) -> str:
    """Return a mark in Lark's syntax: special tokens have no text there."""
    added = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    special = any(each.special and each.content == text for each in added.values())
    return text if special else json.dumps(text)
