"""Text that fits a JSON schema, with drafts as for any other text.

Needs the extra `grammar`. The bundled models know no JSON, so their text is odd.
"""

import json

from mlx_speculation import SpeculativeGenerator, demo_models, json_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["dense"], draft=bundled["draft"]
)
result = generator.generate(
    "# A description of os.path as JSON:\n",
    max_tokens=80,
    constraint=json_schema(SCHEMA, generator.tokenizer, compact=True),
)
print(result.text)
assert result.finish_reason == "stop"
print("parsed:", json.loads(result.text))
print(f"{result.stats.accepted} of {result.stats.drafted} drafted tokens accepted")
