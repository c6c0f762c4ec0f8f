"""Prompts that are the messages of a chat."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from mlx_speculation import InvalidRequestError, SpeculativeGenerator
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
]
TEXT = "<system>Be brief.\n<user>Hi\n<assistant>"


def made(template: str | None = TEMPLATE, first: str = "") -> SpeculativeGenerator:
    tokenizer = byte_tokenizer(first=first)
    tokenizer._tokenizer.chat_template = template
    tokenizer.has_chat_template = template is not None
    return SpeculativeGenerator(build("llama", vocab=256), tokenizer, draft="lookup")


def test_messages_are_rendered_by_the_template_everywhere() -> None:
    generator = made()
    raw = generator.tokenizer.encode(TEXT, add_special_tokens=False)
    assert generator.encode(CHAT) == raw
    assert generator.encode(tuple(CHAT)) == raw
    expected = generator.generate(raw, max_tokens=12).tokens
    assert generator.generate(CHAT, max_tokens=12).tokens == expected
    assert [c.token for c in generator.stream(CHAT, max_tokens=12)] == expected
    alike = generator.generate_batch([CHAT, raw, TEXT], max_tokens=12)
    assert [each.tokens for each in alike] == [expected] * 3


def test_a_content_in_text_parts_is_their_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    chat: list[dict[str, Any]] = [CHAT[0], {"role": "user", "content": parts}]
    generator = made()
    assert generator.encode(chat) == generator.encode(CHAT)


def test_a_template_writes_its_own_special_tokens() -> None:
    """The beginning-of-text token occurs once, where the template puts it."""
    generator = made("<s>" + TEMPLATE)
    tokenizer = generator.tokenizer
    tokenizer._tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert tokenizer.bos_token == "<s>"
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[bos]
    )
    generator = SpeculativeGenerator(build("llama", vocab=257), tokenizer)
    assert generator.encode("Hi")[0] == tokenizer.bos_token_id
    ids = generator.encode(CHAT)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "tool", "content": "x"}], "The chat template refused 1 messages"),
        ([*CHAT, "Hi"], "One of 3 messages is 'Hi'. Each must be a dictionary"),
        ([{"content": "x"}], "One of 1 messages is {'content': 'x'}. Each must be a"),
        (CHAT[0], "Pass a conversation as a list of messages"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
            "^A message has the part .*Pass images by images=",
        ),
        ([{"role": "user", "content": ["x"]}], "has the part 'x', but only text"),
        ([], "The prompt has 0 tokens"),
    ],
)
def test_what_is_no_chat_is_refused(prompt: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        made().stream(prompt)


def test_messages_need_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="the tokenizer has no chat template"):
        made(None).stream(CHAT)
