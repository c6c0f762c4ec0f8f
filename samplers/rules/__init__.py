"""Acceptance rules: token-wise rejection and block verification.

`verification` has the two rules, and `probs` the functions of both. A rule decides how
many drafted tokens are accepted, from probabilities alone.
"""
