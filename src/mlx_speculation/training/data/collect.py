"""Collection of dialogues that the target writes, until there are enough.

Each batch has one temperature. Held-out dialogues come first, half of them greedy, then
those to learn from. The counts in the file of dialogues determine the next batch, so a
resumed run continues with the same texts.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.interrupts import DeferredSignals
from mlx_speculation.training.data.answers import Report, end_ids, write_answers
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.data.own_prompts import write_prompts
from mlx_speculation.training.data.prompts import Messages
from mlx_speculation.training.options import TrainOptions

TEMPERATURES = (0.0, 0.8)
_FRUITLESS = 3  # consecutive batches without a usable prompt, after which it fails


class Collector:
    """Writes dialogues of a target."""

    def __init__(
        self,
        model: nn.Module,  # the target
        tokenizer: Any,  # its tokenizer
        options: TrainOptions,  # of the training
        # Prompts of a file; empty: the target writes all prompts itself
        prompts: Sequence[Messages],
    ) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._prompts = list(prompts)
        random.Random(options.seed).shuffle(self._prompts)
        self._ends = end_ids(tokenizer)
        self._cut: Callable[[], bool] = lambda: False

    def fill(
        self,
        dialogues: Dialogues,  # the file to fill
        report: Report,  # called with the number of dialogues, and the number wanted
        # Called before each batch to learn from but the first; True ends the collection
        stop: Callable[[], bool] = lambda: False,
        # Called while answers are written; True cuts them
        cut: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add batches until the number of dialogues in the options is reached.

        Raises:
            InvalidRequestError: the target writes no usable prompts.
        """
        wanted = self._options.dialogues + self._options.held_out
        self._cut = cut
        fruitless = 0
        while True:
            held_out, count = self._next(dialogues)
            if not count or (not held_out and dialogues.training and stop()):
                return
            report(len(dialogues.all), wanted)
            more, used = self._batch(dialogues, held_out, count, report)
            with DeferredSignals():
                dialogues.add(more, used)
            fruitless = 0 if more else fruitless + 1
            if fruitless == _FRUITLESS:
                raise InvalidRequestError(
                    f"The target wrote {fruitless * count} prompts, and none of them "
                    "has a few tokens. Pass a file of prompts."
                )

    def _next(self, dialogues: Dialogues) -> tuple[bool, int]:
        """Return whether the next batch is held out, and its number of dialogues."""
        most = self._options.batch
        if self._options.own_share == 0:
            most = min(most, len(self._prompts) - dialogues.used)
        half = -(-self._options.held_out // 2)
        held_out = dialogues.held_out
        for temperature in TEMPERATURES:
            missing = half - sum(each.temperature == temperature for each in held_out)
            if missing > 0 and most > 0:
                return True, min(most, missing)
        missing = self._options.dialogues - len(dialogues.training)
        return False, max(0, min(most, missing))

    def _batch(
        self, dialogues: Dialogues, held_out: bool, count: int, report: Report
    ) -> tuple[list[Dialogue], int]:
        """Return a batch of dialogues, and the number of prompts of the file used."""
        number = dialogues.batches
        temperature = TEMPERATURES[number % 2]
        if held_out:
            greedy = sum(each.temperature == 0 for each in dialogues.held_out)
            temperature = TEMPERATURES[greedy >= -(-self._options.held_out // 2)]
        seed = (self._options.seed << 20) + number
        own_count = round(count * self._options.own_share)
        prompts: list[list[int]] = []
        if own_count:
            prompts = write_prompts(
                self._model,
                self._tokenizer,
                own_count,
                most=self._options.prompt_tokens,
                seed=seed,
            )
        done = len(dialogues.all)
        result = [
            self._dialogue(prompt, answer, held_out, True, temperature)
            for prompt, answer in zip(
                prompts, self._answers(prompts, temperature, seed + 1), strict=True
            )
        ]
        used = count - own_count
        taken = [
            self._prompts[(dialogues.used + i) % len(self._prompts)]
            for i in range(used)
        ]
        result += self._conversations(taken, held_out, temperature, seed)
        wanted = self._options.dialogues + self._options.held_out
        report(done + len(result), max(wanted, done + len(result)))
        return result, used

    def _conversations(
        self,
        conversations: Sequence[Messages],
        held_out: bool,
        temperature: float,
        seed: int,
    ) -> list[Dialogue]:
        """Answer conversations turn by turn; each turn is a dialogue of its own."""
        result = []
        histories: list[Messages] = [[] for _ in conversations]
        remaining = [list(messages) for messages in conversations]
        turn = 0
        while any(remaining):
            for history, rest in zip(histories, remaining, strict=True):
                while rest:
                    history.append(rest.pop(0))
                    if history[-1]["role"] == "user":
                        break
            live = [
                h for h in histories if h and h[-1]["role"] == "user"
            ]  # the rest have ended
            prompts = [self._encoded(history) for history in live]
            answers = self._answers(prompts, temperature, seed + 2 + turn)
            for history, prompt, answer in zip(live, prompts, answers, strict=True):
                result.append(
                    self._dialogue(prompt, answer, held_out, False, temperature)
                )
                text = self._tokenizer.decode(
                    [token for token in answer if token not in self._ends]
                )
                history.append({"role": "assistant", "content": text})
            turn += 1
        return result

    def _encoded(self, messages: Messages) -> list[int]:
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "has_chat_template", False):
            text = "\n".join(each["content"] for each in messages)
            return list(tokenizer.encode(text))
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _answers(
        self, prompts: Sequence[list[int]], temperature: float, seed: int
    ) -> list[list[int]]:
        if not prompts:
            return []
        return write_answers(
            self._model,
            prompts,
            most=self._options.answer_tokens,
            temperature=temperature,
            ends=self._ends,
            seed=seed,
            stop=self._cut,
        )

    def _dialogue(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        held_out: bool,
        own_prompt: bool,
        temperature: float,
    ) -> Dialogue:
        tokens = np.array([*prompt, *answer], np.uint32)
        counts = np.arange(len(tokens)) >= (
            0 if own_prompt and not held_out else len(prompt)
        )
        return Dialogue(tokens, counts, held_out, own_prompt, temperature)
