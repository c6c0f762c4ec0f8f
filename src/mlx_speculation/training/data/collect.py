"""Collection of dialogues that the target writes.

Each batch has one temperature. Held-out dialogues come first, half of them greedy, then
dialogues to learn from. The file of dialogues stores the numbers of dialogues, batches
and used prompts. These numbers determine the next batch, so a resumed run continues
with the same texts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.interrupts import DeferredSignals
from mlx_speculation.training.data.answers import end_ids, write_answers
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.data.own_prompts import write_prompts
from mlx_speculation.training.data.prompts import Messages
from mlx_speculation.training.options import TrainOptions

TEMPERATURES = (0.0, 0.8)
_FRUITLESS = 3  # successive batches without usable prompts after which to fail


class Collector:
    """Writes dialogues of a target."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        options: TrainOptions,
        prompts: Sequence[Messages],  # of a file; empty: the target writes all prompts
    ) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._prompts = list(prompts)
        random.Random(options.seed).shuffle(self._prompts)
        self._ends = end_ids(tokenizer)
        self._cut: Callable[[], bool] = lambda: False

    def fill(
        self,
        dialogues: Dialogues,
        # Called with the number of dialogues, and the number wanted
        report: Callable[[int, int], None],
        # Called before each batch to learn from except the first; True: no more batches
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
            learns = held_out is None
            if not count or (learns and dialogues.training and stop()):
                return
            report(len(dialogues.all), wanted)
            more, used = self._batch(dialogues, held_out, count)
            with DeferredSignals():
                dialogues.add(more, used)
            done = len(dialogues.all)
            report(done, max(wanted, done))
            fruitless = 0 if more else fruitless + 1
            if fruitless == _FRUITLESS:
                raise InvalidRequestError(
                    f"The target wrote {fruitless * count} prompts, but all of them "
                    "are too short. Pass a file of prompts."
                )

    def _next(self, dialogues: Dialogues) -> tuple[float | None, int]:
        """Return the next batch's temperature (None: not held out), and its size."""
        most = self._options.batch
        if self._options.own_share == 0:
            most = min(most, len(self._prompts) - dialogues.used)
        half = -(-self._options.held_out // 2)
        for temperature in TEMPERATURES:
            temperatures = [each.temperature for each in dialogues.held_out]
            missing = half - temperatures.count(temperature)
            if missing > 0 and most > 0:
                return temperature, min(most, missing)
        missing = self._options.dialogues - len(dialogues.training)
        return None, max(0, min(most, missing))

    def _batch(
        self, dialogues: Dialogues, held_out: float | None, count: int
    ) -> tuple[list[Dialogue], int]:
        """Return a batch of dialogues, and how many prompts of the file it used.

        `held_out`: the temperature of a held-out batch; None: a batch to learn from.
        """
        number, options = dialogues.batches, self._options
        temperature = TEMPERATURES[number % 2] if held_out is None else held_out
        seed = (options.seed << 20) + number
        own_count = round(count * options.own_share)
        used = count - own_count
        prompts: list[list[int]] = []
        if own_count:
            prompts = write_prompts(
                self._model,
                self._tokenizer,
                own_count,
                most=options.prompt_tokens,
                seed=seed,
            )
        answers = self._answers(prompts, temperature, seed + 1)
        whole = held_out is None  # then prompts by the target are learned too
        pairs = zip(prompts, answers, [True] * len(prompts), strict=True)
        made = [*pairs, *self._conversations(dialogues.used, used, temperature, seed)]
        result = []
        for prompt, answer, by_target in made:
            tokens = np.array([*prompt, *answer], np.uint32)
            begin = 0 if by_target and whole else len(prompt)
            counts = np.arange(len(tokens)) >= begin
            result.append(Dialogue(tokens, counts, not whole, by_target, temperature))
        return result, used

    def _conversations(
        self, first: int, count: int, temperature: float, seed: int
    ) -> Iterator[tuple[list[int], list[int], bool]]:
        """Answer conversations of the file turn by turn; yield (prompt, answer, False).

        False: the target did not write the prompt.
        """
        taken = [self._prompts[(first + i) % len(self._prompts)] for i in range(count)]
        histories: list[Messages] = [[] for _ in taken]
        remaining = [list(messages) for messages in taken]
        turn = 0
        while any(remaining):
            for history, rest in zip(histories, remaining, strict=True):
                while rest:
                    history.append(rest.pop(0))
                    if history[-1]["role"] == "user":
                        break
            # The other conversations have ended.
            live = [each for each in histories if each and each[-1]["role"] == "user"]
            prompts = [self._encoded(history) for history in live]
            answers = self._answers(prompts, temperature, seed + 2 + turn)
            for history, prompt, answer in zip(live, prompts, answers, strict=True):
                yield prompt, answer, False
                text = self._tokenizer.decode(
                    [token for token in answer if token not in self._ends]
                )
                history.append({"role": "assistant", "content": text})
            turn += 1

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
