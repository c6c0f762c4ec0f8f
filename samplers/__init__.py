"""Samplers: turn logits into tokens, and decide which drafted tokens are accepted.

    acceptance      the terms (drafted, accepted, correction, bonus) and result types
    verifier        chooses tokens for drafter and target, and counts accepted ones
    decide          does the verifier's work for all requests of a round
    tree_verifier   does the verifier's work for a draft that is a tree
    sampling        the options of a request
    chooser         turns logits into tokens by these options
    row_context     the tokens before each row of logits
    make_sampler    mlx-lm's sampler functions, with seeds
    user_sampler    a sampler function that the user passes
    rules           token-wise rejection, block verification
    logits          processors, penalties, filters
    noise           random numbers by seed and position
    constraints     schemas and grammars

This package does not know models, caches or text.
"""

from mlx_speculation.samplers.acceptance import (
    Choice,
    Decided,
    Group,
    LogProbs,
    Verified,
    peaks,
)
from mlx_speculation.samplers.chooser import Chooser
from mlx_speculation.samplers.constraints.base import (
    Constraint,
    ConstraintState,
    TokenAutomaton,
    allowed_tokens,
)
from mlx_speculation.samplers.constraints.progress import Constrained
from mlx_speculation.samplers.decide import Ask, decide, propose_all
from mlx_speculation.samplers.logits.processor_kinds import ForkableProcessor, pure
from mlx_speculation.samplers.make_sampler import SeededSampler, make_sampler
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.sampling import (
    LogitsProcessor,
    Sampler,
    Sampling,
    derived_seed,
)
from mlx_speculation.samplers.tree_verifier import (
    best_children,
    serves_trees,
    verify_tree,
)
from mlx_speculation.samplers.verifier import Acceptance, Verifier

__all__ = [
    "Acceptance",
    "Ask",
    "Choice",
    "Chooser",
    "Constrained",
    "Constraint",
    "ConstraintState",
    "Decided",
    "ForkableProcessor",
    "Group",
    "LogProbs",
    "LogitsProcessor",
    "Rows",
    "Sampler",
    "Sampling",
    "SeededSampler",
    "TokenAutomaton",
    "Verified",
    "Verifier",
    "allowed_tokens",
    "best_children",
    "decide",
    "derived_seed",
    "make_sampler",
    "peaks",
    "propose_all",
    "pure",
    "serves_trees",
    "verify_tree",
]
