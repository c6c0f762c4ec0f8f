"""Mutants: making them, finding the tests that run their lines, and judging them."""
