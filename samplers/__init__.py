"""Samplers: from logits to tokens, and which drafted tokens are accepted.

It knows arrays. It does not know models, caches or text.
"""

from mlx_speculation.samplers.acceptance import count_accepted, normalizers, peaks
from mlx_speculation.samplers.batch_verifier import (
    BatchVerified,
    VerifiedGroup,
    VerifyRequest,
    propose_batch,
    verify_batch,
)
from mlx_speculation.samplers.chooser import Chooser
from mlx_speculation.samplers.constraints.base import (
    Constraint,
    ConstraintState,
    TokenAutomaton,
    allowed_tokens,
)
from mlx_speculation.samplers.constraints.progress import Constrained
from mlx_speculation.samplers.logits.processor_kinds import ForkableProcessor, pure
from mlx_speculation.samplers.logits.processors import Processors
from mlx_speculation.samplers.make_sampler import SeededSampler, make_sampler
from mlx_speculation.samplers.results import Chosen, LogProbs, Verified
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.sampling import (
    LogitsProcessor,
    Sampler,
    Sampling,
    derived_seed,
)
from mlx_speculation.samplers.verifier import Acceptance, Verifier

__all__ = [
    "Acceptance",
    "BatchVerified",
    "Chooser",
    "Chosen",
    "Constrained",
    "Constraint",
    "ConstraintState",
    "ForkableProcessor",
    "LogProbs",
    "LogitsProcessor",
    "Processors",
    "Rows",
    "Sampler",
    "Sampling",
    "SeededSampler",
    "TokenAutomaton",
    "Verified",
    "VerifiedGroup",
    "Verifier",
    "VerifyRequest",
    "allowed_tokens",
    "count_accepted",
    "derived_seed",
    "make_sampler",
    "normalizers",
    "peaks",
    "propose_batch",
    "pure",
    "verify_batch",
]
