"""A constraint of your own: the next token is none of the last few.

Target and draft both obey it. The protocols are `Constraint` and `ConstraintState`.
"""

from mlx_speculation import ConstraintError, SpeculativeGenerator, demo_models

# isort: split
import numpy as np
from numpy.typing import NDArray


class NoRepeats:
    """Allows every token except the last `window` tokens of the text.

    Args:
        vocabulary: the number of token ids.
        window: how many of the last tokens are forbidden.
    """

    def __init__(self, vocabulary: int, window: int) -> None:
        self.vocabulary, self.window = vocabulary, window

    def begin(self) -> "NoRepeatsState":
        return NoRepeatsState(self, ())


class NoRepeatsState:
    """A place in one text: the tokens that are forbidden next."""

    may_end = True

    def __init__(self, constraint: NoRepeats, last: tuple[int, ...]) -> None:
        self._constraint, self._last = constraint, last

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.ones(self._constraint.vocabulary, np.bool_)
        mask[list(self._last)] = False
        return mask

    def advance(self, token: int) -> None:
        if token in self._last:
            raise ConstraintError(f"Token {token} is among the last {self._last}.")
        self._last = (*self._last, token)[-self._constraint.window :]

    def fork(self) -> "NoRepeatsState":
        return NoRepeatsState(self._constraint, self._last)


generator = SpeculativeGenerator.from_pretrained(
    demo_models()["dense"], draft=demo_models()["draft"], draft_length=4
)
constraint = NoRepeats(generator.tokenizer.vocab_size, window=8)
prompt = "def area(width, height):"
result = generator.generate(prompt, max_tokens=24, constraint=constraint)
plain = generator.generate(prompt, max_tokens=24, constraint=constraint, draft_length=0)

assert result.tokens == plain.tokens
assert all(
    token not in result.tokens[max(0, i - 8) : i]
    for i, token in enumerate(result.tokens)
)
print(f"{result.stats.accepted} of {result.stats.drafted} drafted tokens accepted")
