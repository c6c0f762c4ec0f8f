"""Acceptance rules: token-wise rejection and block verification.

`probs` has what both share: target and draft probabilities as rows, and the residual
that a correction is drawn from; `verification` has the two. A rule decides how many
drafted tokens are accepted. It does not know models, caches, logits processors or where
its probabilities come from.
"""
