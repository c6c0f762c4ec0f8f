"""Keyed random numbers: functions of (seed, position, purpose, token id).

The same key gives the same number, however many rows are computed together, so that
drafted and plain decoding draw alike. Nothing here knows logits, rules or models.
"""
