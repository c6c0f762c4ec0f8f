"""Acceptance rules: token-wise rejection and block verification.

`verification` has the two rules, and `probs` the functions that both use.
"""
