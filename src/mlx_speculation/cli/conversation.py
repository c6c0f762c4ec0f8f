"""A conversation as token ids that begin with the tokens in the caches.

With replay, the tokens of an answer are kept as they were generated: its text could
encode to other tokens, for which the caches have no rows. The whole conversation is
encoded again if a template changes earlier messages (for example drops reasoning).
Without replay it is encoded again at every message. The caches are then reused as far
as the ids agree.
"""

from collections.abc import Sequence
from typing import Any

from mlx_speculation.cli.chat_template import Message, TemplateOptions, encode
from mlx_speculation.cli.inputs import check_length


class Conversation:
    """Messages of a user and answers to them, of at most `longest` tokens."""

    def __init__(
        self,
        tokenizer: Any,
        template: TemplateOptions,
        *,
        replay: bool = True,
        longest: int | None = None,
    ) -> None:
        self._tokenizer, self._replay = tokenizer, replay
        self._template, self._longest = template, longest
        self.rendered = template.applies(tokenizer)
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self._text = ""  # of the ids

    def ask(self, message: str) -> list[int]:
        """Add a message; return the ids of the conversation up to the answer to it.

        A message that the template refuses, or that makes the conversation too long,
        raises InvalidRequestError and is not added.
        """
        said: Message = {"role": "user", "content": message}
        messages = [*self._messages, said]
        if self.rendered:
            text = self._template.render(self._tokenizer, messages)
        else:
            text = "".join(f"{message['content']}\n" for message in messages)
        if self._replay and self._ids and text.startswith(self._text):
            rest = text[len(self._text) :]
            new = encode(self._tokenizer, rest, rendered=True) if rest else []
            ids = [*self._ids, *new]
        else:
            ids = encode(self._tokenizer, text, rendered=self.rendered)
        check_length(len(ids), self._longest)
        self._messages, self._ids, self._text = messages, ids, text
        return list(ids)

    def answer(self, text: str, tokens: Sequence[int]) -> None:
        """Add a message with the answer; `tokens` may end with a stop token."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += tokens
        self._text += self._tokenizer.decode(list(tokens))
