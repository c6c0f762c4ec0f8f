"""Models with their caches: loading, pairing and lanes."""
