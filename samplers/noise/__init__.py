"""Keyed random numbers: functions of (seed, position, purpose, token id).

A key gives the same number, however many rows are computed together. So speculative and
plain decoding draw the same numbers.
"""
