"""The grammar of one tool call in the format of Hermes chat templates.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

import json
from collections.abc import Sequence
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.schemas.template_process import LARK

# Whitespace as in the templates: the model was trained on it.
SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
SPACING = {"whitespace_flexible": False, **SEPARATORS}


def call_grammar(
    functions: Sequence[dict[str, Any]],
    tokenizer: Any,
    parser: Any,  # the tokenizer's parser of calls
    marks: tuple[str, str],  # the texts before and after a call
) -> str:
    """Return the grammar of a call of one function; ApiError: the format is another."""
    module = getattr(parser, "__module__", "")
    if not module.endswith(".json_tools"):
        raise invalid(
            "tool_choice asks for a call, and the model's chat template writes its "
            f"calls as {module.rpartition('.')[2]!r}: only calls in JSON can be "
            "forced. Leave tool_choice out.",
            "tool_choice",
        )
    begin, end = (_literal(text, tokenizer) for text in marks)
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    rules = [f'start: {begin} "\\n" call "\\n" {end}', f"call: {names}"]
    for i, each in enumerate(functions):
        head = f'{{"name": {json.dumps(each["name"])}, "arguments": '
        arguments = {"type": "object", **(each.get("parameters") or {})}
        schema = json.dumps({**arguments, "x-guidance": SPACING})
        # One rule for each tool: references in a schema point into that schema.
        rules += [f'call_{i}: {json.dumps(head)} arguments_{i} "}}"']
        rules += [f"arguments_{i}: %json {schema}"]
    return LARK + "\n".join(rules)


def _literal(text: str, tokenizer: Any) -> str:
    """Return a mark in Lark's syntax: a special token by name, else a string."""
    added = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    special = any(each.special and each.content == text for each in added.values())
    return text if special else json.dumps(text)
