"""MTP heads of each family in plain arrays."""
