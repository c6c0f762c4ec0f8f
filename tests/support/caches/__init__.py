"""Contents of caches as numbers, and twins: caches fed with the kept tokens only."""
