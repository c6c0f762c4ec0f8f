"""Caches as comparable numbers, and their twins, which saw only the kept tokens."""
