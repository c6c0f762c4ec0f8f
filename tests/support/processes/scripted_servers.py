"""Servers with the real engine, whose answers follow a script.

A script returns the text of an answer. The text becomes a constraint that allows one
token at each position; everything else is as in any request.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_speculation import PrefixCache, SpeculativeGenerator, demo_models
from mlx_speculation.samplers.constraints.base import TokenAutomaton
from mlx_speculation.server import Defaults, Server
from mlx_speculation.server.answering import Answering
from mlx_speculation.server.job import Job
from mlx_speculation.server.request.options import GenerationRequest
from support.models.tiny_models import build
from support.processes.servers import nearly, serving

# Returns the text of the answer; None: the model chooses.
Script = Callable[[GenerationRequest], str | None]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
# Like Qwen's: a system message after the first message raises.
TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>' }}{% endif %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' }}
{%- elif m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{%- set tool_call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


@cache
def agent_tokenizer() -> TokenizerWrapper:
    """Return the demo's tokenizer with `TEMPLATE`, `SPECIAL` and tool calls in JSON."""
    file = demo_models()["draft"] / "tokenizer.json"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(file)),
        chat_template=TEMPLATE,
        eos_token=SPECIAL[1],
        model_max_length=1 << 30,
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        eos_token_ids=[fast.convert_tokens_to_ids(SPECIAL[1])],
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def agent_maker(
    draft: str | None = None, kind: str = "llama"
) -> Callable[[PrefixCache | None], SpeculativeGenerator]:
    """Return a maker of generators; the draft "near" is a model that is often right."""

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        tokenizer = agent_tokenizer()
        vocab = len(tokenizer._tokenizer)
        target = build(kind, vocab=vocab, layers=1)
        drafts: Any = draft
        if draft == "near":
            drafts = nearly(target, build(kind, vocab=vocab, layers=1), 0.03, 1)
        return SpeculativeGenerator(
            target, tokenizer, draft=drafts, prefix_cache=prefixes
        )

    return make


@contextmanager
def scripted(
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    *,
    draft: str | None = None,
    limits: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    real = Answering._constraint

    def constraint(answering: Answering, job: Job, state: str, more: Any) -> Any:
        text = script(job.request)
        if text is None:
            return real(answering, job, state, more)
        tokens = agent_tokenizer().encode(text, add_special_tokens=False)
        steps = {place: {token: place + 1} for place, token in enumerate(tokens)}
        return TokenAutomaton(steps, accepting={len(tokens)})

    monkeypatch.setattr(Answering, "_constraint", constraint)
    usual = {"max_tokens": 0, "prompt_tokens": 0, "read_seconds": 30.0}
    with serving(
        agent_maker(draft),
        draft=draft,
        limits={**usual, **(limits or {})},
        defaults=Defaults(),
        prefixes=PrefixCache(1 << 30),
        **settings,
    ) as server:
        yield server


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
