"""Acceptance rules: token-wise rejection and block verification.

`verification` has the two rules, and `probs` the functions of both: target and draft
probabilities as rows, and the residual that a correction is drawn from. A rule decides
how many drafted tokens are accepted. It does not know models, caches, logits processors
or the origin of its probabilities.
"""
