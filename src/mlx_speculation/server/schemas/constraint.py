"""Constraints of a text: by a schema, and after thinking; grammars of forced calls.

The child process of a schema has one matcher of llguidance, which has consumed the
tokens of one state. For the mask of another state, the matcher rolls back to the
common prefix of both, then consumes the rest. A mask takes one message each way, about
0.1 ms on a Linux CPU.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.base import Constraint, ConstraintState
from mlx_speculation.samplers.constraints.llguidance import failed_here
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.schemas.template_process import FAILED, LARK

# Which token ids may come next, bool [ids], and whether the text may end.
Mask = tuple[NDArray[np.bool_], bool]
# Whitespace as in chat templates: models were trained on it.
SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
SPACING = {"whitespace_flexible": False, **SEPARATORS}


def unpacked(answer: bytes, ids: int) -> Mask:
    """Return the mask of `ids` ids that a child has answered, or raise its error."""
    if answer[:1] == FAILED:
        raise failed_here(answer[1:].decode())
    bits = np.frombuffer(answer, dtype=np.uint8, offset=2)
    # [ids], without the id that llguidance has for the end of a text
    mask = np.unpackbits(bits, count=ids, bitorder="little").view(np.bool_)
    return mask, bool(answer[1])


class SchemaConstraint:
    """A compiled schema; see `Constraint`."""

    def __init__(
        self,
        ask: Callable[[bytes], bytes | str],  # the child's answer, or an error
        first: Mask,  # of the first token
        stack: ExitStack,  # ends the child
    ) -> None:
        self._ask, self._first, self._stack = ask, first, stack
        self._path: tuple[int, ...] = ()  # tokens that the matcher has consumed
        self._error: str | None = None
        self._lock = threading.Lock()

    def begin(self) -> "SchemaState":
        """Return a state before the first generated token."""
        return SchemaState(self, (), *self._first)

    def close(self) -> None:
        """End the child. A second call does nothing."""
        with self._lock:
            self._end("The request has ended, and its schema with it.")

    def after(self, path: tuple[int, ...]) -> Mask:
        """Return the mask after `path`; ConstraintError: the child failed or ended."""
        with self._lock:
            kept = min(len(self._path), len(path))
            while self._path[:kept] != path[:kept]:
                kept -= 1
            step = [len(self._path) - kept, *path[kept:]]
            answer = self._error or self._ask(json.dumps(step).encode())
            if isinstance(answer, str):
                self._end(answer)
                raise ConstraintError(answer)
            # The matcher of a child begins anew after an error.
            self._path = () if answer[:1] == FAILED else path
            return unpacked(answer, len(self._first[0]))

    def _end(self, why: str) -> None:
        self._error = self._error or why
        self._stack.close()


@dataclass(slots=True, eq=False)
class SchemaState:
    """The state of one text under a `SchemaConstraint`; see `ConstraintState`."""

    schema: SchemaConstraint
    path: tuple[int, ...]  # the tokens of the text so far
    mask: NDArray[np.bool_]  # which ids may come next, bool [ids]
    may_end: bool

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids of the tokenizer]."""
        return self.mask

    def advance(self, token: int) -> None:
        """Append a token to the text; see `ConstraintState`."""
        mask = self.mask
        if not (0 <= token < len(mask) and mask[token]):
            raise ConstraintError(
                f"Token {token} is not allowed here; only {int(mask.sum())} of the "
                f"tokenizer's {len(mask)} ids are. Take one that allowed() names."
            )
        path = (*self.path, token)
        self.mask, self.may_end = self.schema.after(path)
        self.path = path

    def fork(self) -> "SchemaState":
        """Return an independent state at the same position of the text."""
        return SchemaState(self.schema, self.path, self.mask, self.may_end)


class AfterThinking:
    """A `Constraint` and its state: free thinking, then an inner constraint.

    A fixed sequence of tokens, the mark, ends the thinking. Once the budget is spent,
    only the mark is allowed.
    """

    def __init__(
        self,
        mark: Sequence[int],  # the tokens that end thinking
        ids: int,  # the number of token ids
        *,
        inner: Constraint | None = None,  # of the answer; None: any text is allowed
        budget: int | None = None,  # maximum tokens of thinking; None: no limit
    ) -> None:
        self._mark, self._inner, self._budget = tuple(mark), inner, budget
        self._anything = np.ones(ids, dtype=np.bool_)
        self._count = 0  # tokens of thinking so far
        self._tail: tuple[int, ...] = ()  # the last of them, at most `len(mark)`
        self._answer: ConstraintState | None = None  # state of `inner`, after the mark

    def begin(self) -> "AfterThinking":
        """Return a state before the first generated token."""
        return self.fork()

    def fork(self) -> "AfterThinking":
        """Return an independent state at the same position of the text."""
        state = copy(self)
        state._answer = None if self._answer is None else self._answer.fork()
        return state

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids]."""
        if self._answer is not None:
            return self._answer.allowed()
        if self._forced is not None:
            return np.equal(np.arange(self._forced + 1), self._forced)
        return self._anything

    @property
    def may_end(self) -> bool:
        """True if the text may end here."""
        if self._answer is not None:
            return self._answer.may_end
        return self._tail == self._mark

    def advance(self, token: int) -> None:
        """Append a token to the text; see `ConstraintState`."""
        if self._answer is not None:
            self._answer.advance(token)
            return
        if self._forced not in (None, token):
            raise ConstraintError(
                f"Token {token} is not allowed: the thinking has had its "
                f"{self._budget} tokens. Take one that allowed() names."
            )
        if self._tail == self._mark:
            return
        self._count += 1
        self._tail = (*self._tail, token)[-len(self._mark) :]
        if self._tail == self._mark and self._inner is not None:
            self._answer = self._inner.begin()

    @property
    def _forced(self) -> int | None:
        """The mark's next token if the budget is spent; None: any token is allowed."""
        mark, tail = self._mark, self._tail
        if self._budget is None or self._count < self._budget or tail == mark:
            return None
        # The text may already end with a part of the mark.
        ends = range(len(tail) + 1)
        return mark[max(n for n in ends if tail[len(tail) - n :] == mark[:n])]


def call_grammar(
    functions: Sequence[dict[str, Any]],
    tokenizer: Any,
    parser: Any,  # the tokenizer's parser of calls
    marks: tuple[str, str],  # the texts before and after a call
) -> str:
    """Return the grammar of one call of any function, in the form of Hermes templates.

    Raise ApiError if the tokenizer's calls have another form.
    """
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
