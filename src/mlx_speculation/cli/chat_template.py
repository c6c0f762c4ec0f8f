"""Conversion of messages to the token ids of a prompt, with the chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_speculation.cli.inputs import json_object, sound_text
from mlx_speculation.cli.options import TEMPLATE
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.models.vision import ImagePrompt

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Arguments of a chat template."""

    panel: ClassVar[str] = TEMPLATE

    system_prompt: str | None = option(None, "System message.")
    ignore_chat_template: bool = option(
        False, "Continue the raw prompt, even if the tokenizer has a chat template."
    )
    chat_template_config: str | None = option(
        None,
        "JSON object of keyword arguments for the chat template, such as "
        "'{\"enable_thinking\": false}'.",
    )

    def check(self) -> None:
        """Refuse a malformed system message or config."""
        self._system()
        self._config()

    def applies(self, tokenizer: Any) -> bool:
        """Return whether the tokenizer's template renders messages."""
        there = bool(tokenizer.has_chat_template) and not self.ignore_chat_template
        needed = {
            "--system-prompt": self.system_prompt,
            "--chat-template-config": self.chat_template_config,
        }
        for name, value in needed.items():
            if value is not None and not there:
                raise InvalidRequestError(
                    f"{name} is given, and no chat template is used: "
                    + _why_none(tokenizer)
                )
        return there

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        prefill: str | None = None,
    ) -> str:
        """Return the text of a conversation; `prefill` begins the answer to it."""
        said: list[Any] = [*self._system(), *messages]
        if prefill is not None:
            said.append({"role": "assistant", "content": prefill})
        try:
            text: str = tokenizer.apply_chat_template(
                said,
                tokenize=False,
                add_generation_prompt=prefill is None,
                continue_final_message=prefill is not None,
                **self._config(),
            )
        except Exception as error:  # a template can raise any exception
            raise InvalidRequestError(
                f"The chat template refused {len(said)} messages: "
                f"{type(error).__name__}: {error}. See --ignore-chat-template."
            ) from error
        return text

    def with_images(
        self, generator: "SpeculativeGenerator", said: str, images: Sequence[Path]
    ) -> "ImagePrompt":
        """Return a prompt with images; a raw text must contain their markers."""
        model: Any = generator.model
        if not self.applies(generator.tokenizer):
            messages: Any = said
        else:
            messages = [*self._system(), {"role": "user", "content": said}]
        made: ImagePrompt = model.image_prompt(messages, images, self._config())
        return made

    def _system(self) -> list[Message]:
        if self.system_prompt is None:
            return []
        text = sound_text("--system-prompt", self.system_prompt)
        return [{"role": "system", "content": text}]

    def _config(self) -> dict[str, Any]:
        if self.chat_template_config is None:
            return {}
        return json_object("--chat-template-config", self.chat_template_config)


def encode(tokenizer: Any, text: str, *, rendered: bool) -> list[int]:
    """Encode a text as mlx-lm does; a `rendered` text already has special tokens."""
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids = tokenizer.encode(text, add_special_tokens=not (rendered or begins))
    return [int(token) for token in ids]


def _why_none(tokenizer: Any) -> str:
    if tokenizer.has_chat_template:
        return "--ignore-chat-template is given too. Leave one of them out."
    return "the tokenizer has none. Leave the option out, or take a chat model."
