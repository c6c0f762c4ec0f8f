"""One row of a batch: a stream whose rounds the batch runs, and why some run alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Unpack

import mlx.nn as nn

from mlx_speculation.caches import KVQuantization, has_states
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Plan
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stream import Generation, Stream
from mlx_speculation.interrupts import raised_by_signal
from mlx_speculation.models import Lane, why_alone


class StreamSource(Protocol):
    """The members of a `SpeculativeGenerator` that a batch uses."""

    @property
    def model(self) -> nn.Module:
        """The target."""
        ...

    @property
    def lengths(self) -> PolicyFactory:
        """Decides draft lengths."""
        ...

    @property
    def ranks(self) -> int:
        """The number of ranks that the target is spread over."""
        ...

    def stream(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Stream:
        """Make a stream; see `SpeculativeGenerator.stream`."""
        ...


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One request among others."""

    uid: int  # its name
    stream: Stream  # turns its tokens into text, and ends it
    alone: str | None = None  # why it cannot run with others; None: it can
    # Its own length for the next round; the batch decides where None
    planned: Plan | None = None
    # The same for the round after that, which is asked for early
    next_plan: Plan | None = None
    error: Exception | None = None  # what it has failed with
    # Of its last round, to be given out
    chunks: list[Chunk] = field(default_factory=list)

    # Found once, as they are asked for in each round:
    generation: Generation = field(init=False)  # of its stream
    request: Request = field(init=False)  # what its rounds are run with
    policy: DraftLengthPolicy = field(init=False)  # what it would have alone
    # Its drafter, if a rule chooses when it has offered proposals; else None
    ruled: RuledDrafter | None = field(init=False)
    # Its drafter, of several the one that all rows may share; for plain decoding one
    # that proposes nothing
    drafter: OpenDrafter = field(init=False)
    tokens: list[int] = field(init=False)  # its known tokens

    def __post_init__(self) -> None:
        self.generation = self.stream.generation
        request = self.request = self.stream.request
        self.tokens = request.sequence.tokens
        policy = self.policy = request.policy
        self.ruled = policy.drafter if isinstance(policy, RuleDraftLength) else None
        self.drafter = request.open_drafter.shared

    @property
    def quantization(self) -> KVQuantization | None:
        """Quantization of its caches, which those beside it must share."""
        target = self.request.target
        if target.quantization is None:
            return None
        target.quantization.replace(target.caches)  # of a prompt of one token
        return replace(target.quantization, start=0)

    @property
    def ended(self) -> bool:
        """Return whether it has ended, or failed."""
        return self.error is not None or self.generation.result is not None

    @property
    def lanes(self) -> list[Lane]:
        """Its own lanes, of target and draft models; they are empty while shared."""
        result = [self.request.target, *self.request.open_drafter.lanes]
        return [lane for lane in result if lane is not None]

    def let_go(self) -> None:
        """Let go of what its lanes and its head hold, once it has ended."""
        for lane in self.lanes:
            lane.caches = []
        self.drafter.let_go()

    def begin(self, fits: Callable[[int], bool]) -> bool:
        """Read its prompt as far as it fits, see `Generation.begin`.

        Raises:
            Exception: whatever the model raised; the stream has ended with it, unless
                a signal's handler has raised it.
        """
        try:
            return self.generation.begin(fits)
        except Exception as error:
            if not raised_by_signal(error):
                self.generation.end("error")
            raise

    def keep_prompt(self) -> None:
        """Leave what was read of the prompt to later requests already now."""
        if self.generation.prefixes is not None:
            self.generation.prefixes.store(self.tokens, ended=False)

    def fail(self, error: Exception | None = None) -> None:
        """End with an error; the others go on. None: one that was raised elsewhere."""
        self.error = error or self.error
        if self.generation.result is None:
            self.generation.end("error")


def reason_alone(stream: Stream, model: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a request cannot run with others; None: it can."""
    request = stream.request
    target = request.target
    first = len(request.sequence.tokens) == 1 and target.seen == 0
    passed = (options.get("prompt_cache"), options.get("draft_cache"))
    reasons = {
        "it is exact, and other rows would change its bits": target.shape is not None,
        "it writes to caches of the caller's": any(c is not None for c in passed),
        "its rounds are to be explained": bool(options.get("explain")),
        "its caches are quantized from a later position on": _quantized_later(stream),
        # mlx-lm puts zeros beside other rows' states, and not every model begins so.
        "its prompt of one token leaves recurrent layers without a state": first
        and has_states(target.caches),
    }
    result = next((reason for reason, holds in reasons.items() if holds), None)
    return result or why_alone(model)


def _quantized_later(stream: Stream) -> bool:
    """Return whether caches are to be quantized once a round has been run."""
    request = stream.request
    how, read = request.target.quantization, len(request.sequence.tokens) - 1
    return how is not None and how.start > read
