"""One row of a batch, and the reasons why a row runs alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Unpack

import mlx.nn as nn

from mlx_speculation.caches import KVQuantization, has_states
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stream import Generation, Stream
from mlx_speculation.interrupts import raised_by_signal
from mlx_speculation.models import Lane, why_alone


class StreamSource(Protocol):
    """The members of a `SpeculativeGenerator` that a batch or a calibration uses."""

    @property
    def model(self) -> nn.Module:
        """The target."""
        ...

    @property
    def draft(self) -> Draft | None:
        """The draft."""
        ...

    @property
    def lengths(self) -> PolicyFactory:
        """The factory of draft length policies."""
        ...

    @property
    def ranks(self) -> int:
        """The number of ranks over which the target is sharded."""
        ...

    @property
    def exact(self) -> int | None:
        """The number of tokens of each forward in exact mode; None: not exact."""
        ...

    def stream(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Stream:
        """Make a stream; see `SpeculativeGenerator.stream`."""
        ...


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One request of a batch: a stream whose rounds the batch runs."""

    uid: int  # returned by `BatchGenerator.insert`
    stream: Stream
    alone: str | None = None  # why it cannot share forwards; None: it can
    error: Exception | None = None  # the error that ended it
    chunks: list[Chunk] = field(default_factory=list)  # of its last round

    # Looked up once, since each round needs them:
    generation: Generation = field(init=False)
    request: Request = field(init=False)
    policy: DraftLengthPolicy = field(init=False)  # used when it runs alone
    planner: Any = field(init=False)  # plans its drafts in a batch
    # `policy.drafter` of a `RuleDraftLength`; None: another policy
    ruled: RuledDrafter | None = field(init=False)
    # The drafter; of a cascade, the member that requests can share
    drafter: OpenDrafter = field(init=False)
    tokens: list[int] = field(init=False)  # the known tokens

    def __post_init__(self) -> None:
        self.generation = self.stream.generation
        request = self.request = self.stream.request
        self.tokens = request.sequence.tokens
        policy = self.policy = request.policy
        self.ruled = policy.drafter if isinstance(policy, RuleDraftLength) else None
        self.drafter = request.open_drafter.shared

    @property
    def quantization(self) -> KVQuantization | None:
        """Quantization of the caches, without its start; see `BatchQueue.groups`."""
        target = self.request.target
        return target.quantization and replace(target.quantization, start=0)

    @property
    def unread(self) -> int:
        """The number of prompt tokens that the target has not read."""
        return len(self.tokens) - self.request.target.seen

    @property
    def ended(self) -> bool:
        """Return whether the request has ended, with an error or without."""
        return self.error is not None or self.generation.result is not None

    @property
    def lanes(self) -> list[Lane]:
        """The request's own lanes; in a batch, their caches move into shared lanes."""
        result = [self.request.target, *self.request.open_drafter.lanes]
        return [lane for lane in result if lane is not None]

    def let_go(self) -> None:
        """Drop the caches of the lanes and the state of the drafter."""
        for lane in self.lanes:
            lane.caches = []
        self.drafter.let_go()

    def begin(self, fits: Callable[[int], bool]) -> bool:
        """Read the part of the prompt that fits, see `Generation.begin`.

        An error of the model ends the stream; an error of a signal handler does not.
        """
        try:
            return self.generation.begin(fits)
        except Exception as error:
            if not raised_by_signal(error):
                self.generation.end("error")
            raise

    def keep_prompt(self) -> None:
        """Store the read prompt in the prefix cache, for later requests."""
        if self.generation.prefixes is not None:
            self.generation.prefixes.store(self.tokens, ended=False)

    def fail(self, error: Exception | None = None) -> None:
        """End this request with `error`; None: keep the error that it has, if any."""
        self.error = error or self.error
        if self.generation.result is None:
            self.generation.end("error")


def reason_alone(stream: Stream, model: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a request cannot share forwards with others; None: it can."""
    request = stream.request
    target = request.target
    first = len(request.sequence.tokens) == 1 and target.seen == 0
    passed = (options.get("prompt_cache"), options.get("draft_cache"))
    reasons = {
        "it is exact, and other rows would change its bits": target.shape is not None,
        "it writes to caches of the caller's": any(c is not None for c in passed),
        "its rounds are to be explained": bool(options.get("explain")),
        "quantization of its caches begins after the prompt": _quantized_later(stream),
        # mlx-lm replaces a missing state by zeros; not every model begins with zeros.
        "its prompt of one token leaves recurrent layers without a state": first
        and has_states(target.caches),
    }
    result = next((reason for reason, holds in reasons.items() if holds), None)
    return result or why_alone(model)


def _quantized_later(stream: Stream) -> bool:
    """Return whether quantization of the caches begins only after the prompt."""
    request = stream.request
    how, read = request.target.quantization, len(request.sequence.tokens) - 1
    # max(1, ...): without a prefill, nothing is quantized before the first forward.
    return how is not None and max(1, how.start) > read
