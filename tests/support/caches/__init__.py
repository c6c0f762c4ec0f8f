"""Caches as comparable numbers, and twins of them that saw the kept tokens only."""
