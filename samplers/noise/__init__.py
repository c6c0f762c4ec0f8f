"""Keyed random numbers: functions of (seed, position, purpose, token id).

A key always gives the same number, however many rows are computed together. So
speculative and plain decoding draw the same numbers. This package does not know logits,
rules or models.
"""
