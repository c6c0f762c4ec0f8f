"""How much is accepted, by the distributions of draft and target, in closed form.

For a benchmark that prints expected beside observed values. For keyed choice and
token-wise rejection, sum over all draft positions that were reached (all drafts before
were accepted): the sum of these values and the number accepted have the same mean.
For block verification, whose coins look at all prefixes, sum over rounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from mlx_speculation.samplers import Acceptance, Verifier
from mlx_speculation.samplers.rules.probs import draft_distributions
from mlx_speculation.samplers.rules.verification import BLOCK


@dataclass(slots=True)
class Expected:
    """Accepted tokens of each round of a draft model, counted and expected.

    Attributes:
        accepted: counted.
        expected: under keyed choice and rejection the sum, over the positions that
            were reached, of the acceptance of the two distributions there; under block
            verification what its paper's p_1 to p_k add up to.
    """

    accepted: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)

    @property
    def length(self) -> float:
        """The mean accepted length that is expected."""
        return 1 + fmean(self.expected)

    @property
    def apart(self) -> float:
        """How far counted and expected are apart, in standard errors."""
        pairs = zip(self.accepted, self.expected, strict=True)
        differences = [one - other for one, other in pairs]
        spread = stdev(differences) / len(differences) ** 0.5
        return fmean(differences) / spread if spread else 0.0


@contextmanager
def watched(acceptance: Acceptance) -> Iterator[Expected]:
    """Let all verifiers in the block note what they accept, and what is expected."""
    found, draft_probs = Expected(), list[mx.array]()
    propose, verify = Verifier.propose, Verifier.verify

    def proposed(self: Verifier, logits: Any, rows: Any, ids: Any = None) -> Any:
        if rows.lead == 0:
            draft_probs.clear()
        draft_probs.append(self.probs(logits, rows, for_draft=True))
        return propose(self, logits, rows, ids)

    def verified(
        self: Verifier,
        logits: Any,
        rows: Any,
        drafted: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        result = verify(self, logits, rows, drafted, *rest, **more)
        if drafted is not None and result.accepted is not None:
            target, draft = self.probs(logits, rows), mx.concatenate(draft_probs)
            if acceptance == "block":
                expected = block_accepted(target, draft, drafted)
            else:
                keyed = acceptance == "keyed"
                rule = keyed_acceptance if keyed else tokenwise_acceptance
                reached = mx.arange(len(drafted)) <= result.accepted
                expected = (rule(target[:-1], draft) * reached).sum()
            numbers: Any = mx.stack([result.accepted, expected]).tolist()
            found.accepted.append(numbers[0])
            found.expected.append(numbers[1])
        return result

    patched: Any = Verifier
    patched.propose, patched.verify = proposed, verified
    try:
        yield found
    finally:
        patched.propose, patched.verify = propose, verify


def keyed_agreement(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """Return the probability that both choose token x with the same Gumbel noise.

    1 / sum over y of max(p_y / p_x, q_y / q_x). With the tokens sorted by p / q the
    maximum changes sides once, so two running sums do: O(vocab log vocab). In float32
    they put the acceptance off by 1e-4 at a vocabulary of 150,000.

    Args:
        target_probs: [..., vocab].
        draft_probs: [..., vocab].

    Returns:
        [..., vocab]; its sum is the acceptance of keyed choice.
    """
    both = (target_probs > 0) & (draft_probs > 0)
    ratio = mx.where(target_probs > 0, target_probs / draft_probs, 0)  # inf is last
    order = mx.argsort(ratio, axis=-1)
    rank = mx.argsort(order, axis=-1)
    above = mx.cumsum(
        mx.take_along_axis(target_probs, order, axis=-1), axis=-1, reverse=True
    )
    below = mx.cumsum(
        mx.take_along_axis(draft_probs, order, axis=-1), axis=-1, inclusive=False
    )
    total = mx.take_along_axis(above, rank, axis=-1) / target_probs
    total = total + mx.take_along_axis(below, rank, axis=-1) / draft_probs
    return mx.where(both, 1 / total, 0)


def keyed_acceptance(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """Return the acceptance of keyed choice: [..., vocab] twice to [...]."""
    return keyed_agreement(target_probs, draft_probs).sum(axis=-1)


def tokenwise_acceptance(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """Return the acceptance of token-wise rejection: [..., vocab] twice to [...].

    The sum over tokens of min(p, q); one less the total variation distance.
    """
    return mx.minimum(target_probs, draft_probs).sum(axis=-1)


def block_accepted(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return how many tokens block verification accepts in a round, on average.

    The sum of p_1 to p_k along the drafted tokens. The mean over rounds is that of the
    accepted count; a single round's value is not its mean given the drafted tokens.

    Args:
        target_probs: [..., k + 1, vocab].
        draft_probs: [..., k, vocab], or None for tokens chosen without chance.
        drafted: integer [..., k].

    Returns:
        [...].
    """
    draft = draft_distributions(target_probs, draft_probs, drafted)
    return BLOCK.odds(target_probs, draft, drafted).shares[..., 1:].sum(axis=-1)
