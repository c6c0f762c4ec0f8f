"""A conversation as token ids, such that what the caches hold stays its beginning.

An answer's tokens are kept as they were generated: the same text, encoded again, may
split into others, and the caches would not fit it. Where a template rewrites what was
said before, such as by leaving out what was thought, everything is encoded again, and
the caches serve as far as the ids agree. Without replay everything always is.
"""

from collections.abc import Sequence
from typing import Any

from mlx_speculation.cli.chat_template import Message, TemplateOptions, encode


class Conversation:
    """Messages of a user and answers to them."""

    def __init__(
        self, tokenizer: Any, template: TemplateOptions, *, replay: bool = True
    ) -> None:
        self._tokenizer, self._replay = tokenizer, replay
        self._template = template
        self.rendered = template.applies(tokenizer)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self._text = ""  # of the ids

    def ask(self, message: str) -> list[int]:
        """Add a message; return the ids of everything up to its answer.

        Raises:
            InvalidRequestError: the template refuses it, and it is not added.
        """
        said: Message = {"role": "user", "content": message}
        text = self._render([*self._messages, said])
        self._messages.append(said)
        if self._replay and self._ids and text.startswith(self._text):
            rest = text[len(self._text) :]
            self._ids = [*self._ids, *self._encode(rest)] if rest else self._ids
        else:
            self._ids = encode(self._tokenizer, text, rendered=self.rendered)
        self._text = text
        return list(self._ids)

    def answer(self, text: str, tokens: Sequence[int]) -> None:
        """Add the answer to the last message: text, and tokens with the stop."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += tokens
        self._text += self._tokenizer.decode(list(tokens))

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [int(token) for token in ids]

    def _render(self, messages: Sequence[Message]) -> str:
        if self.rendered:
            return self._template.render(self._tokenizer, messages)
        return "".join(f"{message['content']}\n" for message in messages)
