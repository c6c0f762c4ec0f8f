"""The target's forwards of a round, and the choices from their rows.

    step       known tokens only: committed when submitted; the last row chooses a token
    verify     drafts too: k + 1 rows of each request are decided on the device

Requests are padded on the right to the longest draft. Each keeps a prefix of its rows:

    fed       t d1 d2 d3        3 drafted, the first 2 accepted: keeps 3
              t d1 .  .         1 drafted and accepted: keeps 2
              t .  .  .         none drafted: keeps 1
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import NOTHING, Proposal, rectangle
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.round.request import Running
from mlx_speculation.models import RequestRound
from mlx_speculation.samplers import Ask, Decided, Group, Rows, Verified, decide


def submit_step(running: Running, after: Pending | None = None) -> Pending:
    """Submit and commit a plain step.

    It is fed the tokens that the step before it, `after`, chose; None: the known tokens
    that the target has not seen.
    """
    clock, early = running.clock, running.explain or running.masked
    fed = unseen(running) if after is None else after.tokens[:, None]
    count = fed.shape[1]
    with running.lane.begin(count, whole=True) as lane_round:
        # The forward may submit some of its layers before it returns.
        logits = clock.hand_over("verify", lane_round.forward, fed)
        if count > 1:
            logits = logits[:, -1:]
        if early and after is not None:
            after.wait(clock)  # the masks need its tokens
        if early:
            clock.submit("verify", logits)  # runs while masks are made
        drafts = [NOTHING] * len(running.requests)
        decided, _ = _decided(running, logits, drafts, None if after is None else fed)
        if running.alone:
            verified = decided.groups[0].verified
            tokens, arrays = verified.tokens, verified.arrays
        else:
            tokens = decided.first_tokens()
            arrays = [tokens, *decided.arrays]
        clock.hand_over("verify", mx.async_eval, *arrays)
        lane_round.commit(count)
    return Pending(lane_round, count, logits if early else None, decided, tokens)


def submit_verify(
    running: Running,
    lane_round: RequestRound,
    drafts: Sequence[Proposal],
    step: Pending | None,
) -> Pending:
    """Submit a forward over the known tokens unseen by the target, and over drafts.

    If a step is in flight (`step`), the drafts begin behind the token that it chooses.
    """
    # The numbers are those of "One round, in time" in docs/how_a_round_works.md.
    # 4. One forward of the target over the unseen known tokens and the drafts.
    clock, exact = running.clock, running.explain
    fed = unseen(running) if step is None else step.tokens[:, None]
    matrix = rectangle(drafts)
    drafted = [draft.tokens for draft in drafts]
    if matrix is not None:
        # Submitted first: in one graph, drafts would be ready only with the logits.
        clock.submit("draft", *drafted)
    both = fed if matrix is None else mx.concatenate([fed, matrix], axis=1)
    logits = lane_round.forward(both)[:, fed.shape[1] - 1 :]
    if not exact:
        clock.submit("verify", logits)  # runs while the graph of choices is built
    if step is not None:
        step.wait(clock)
    if matrix is not None:
        clock.wait("draft", *drafted)
    if exact:
        clock.submit("verify", logits)
    # 5. Each request's rows become choices and a number of accepted tokens.
    before = None if step is None else fed
    decided, turns = _decided(running, logits, drafts, before, matrix)
    if exact or turns:
        clock.wait("verify", logits)
    clock.submit("sampler" if exact else "verify", *decided.arrays)
    return Pending(lane_round, fed.shape[1], logits, decided, fed, turns=turns)


def unseen(running: Running) -> mx.array:
    """Return the known tokens that the target has not seen, uint32 [requests, n]."""
    tokens = []
    for request in running.requests:
        tokens.append(request.sequence.tokens[request.target.seen :])
    return mx.array(tokens, mx.uint32)


def _decided(
    running: Running,
    logits: mx.array,
    drafts: Sequence[Proposal],
    before: mx.array | None,
    matrix: mx.array | None = None,
) -> tuple[Decided, dict[int, Iterator[Verified]]]:
    """Decide on the rows [requests, n, vocab] of the requests that are not sequential.

    Rows of a sequential request are decided one after another: the dict has an iterator
    over its decisions, by its index in `running.requests`.

    `before` are tokens of a step that come before the drafts, uint32 [requests, 1];
    `matrix` the tokens of the drafts, [requests, n - 1].
    """
    requests: dict[int, Ask] = {}
    turns: dict[int, Iterator[Verified]] = {}
    failed: dict[int, Exception] = {}
    listed: Any = _read(before, matrix) if running.masked else None
    for place, request in enumerate(running.requests):
        draft, known, tokens = drafts[place], request.sequence, drafts[place].tokens
        count = len(tokens)
        ahead = drafted = tokens if count else None
        if before is not None:
            ahead = mx.concatenate([before[place], tokens]) if count else before[place]
        rows = Rows(known.tokens, ahead, count + 1, known.start)
        if request.masks is not None:
            row = [] if ahead is None else listed[place][: len(ahead)]
            try:
                rows = request.masks.on(rows, row)
            except Exception as error:
                if running.alone:
                    raise
                failed[place] = error
                continue
        verifier = request.decisions or request.verifier
        if running.alone and not running.sequential:
            verified = verifier.verify(
                logits[0], rows, drafted, draft.probs, top=request.top
            )
            return Decided((Group((0,), verified),), {}), turns
        if place not in running.sequential:
            requests[place] = Ask(verifier, rows, drafted, draft.probs, request.top)
            continue
        turns[place] = verifier.sequential(
            logits[place, : count + 1], rows, drafted, draft.probs, top=request.top
        )
    if len(requests) == len(drafts):
        return decide([*requests.values()], logits, matrix), turns
    decided = _decide_some(requests, logits, matrix)
    decided.failed.update(failed)
    return decided, turns


def _decide_some(
    requests: dict[int, Ask], logits: mx.array, matrix: mx.array | None
) -> Decided:
    if not requests:
        return Decided((), {})
    index = mx.array([*requests])
    matrix = None if matrix is None else matrix[index]
    return decide([*requests.values()], logits[index], matrix).at([*requests])


def _read(before: mx.array | None, matrix: mx.array | None) -> Any:
    """Return the step's tokens and the drafts as lists, in a single read."""
    arrays = [array for array in (before, matrix) if array is not None]
    return mx.concatenate(arrays, axis=1).tolist() if arrays else None
