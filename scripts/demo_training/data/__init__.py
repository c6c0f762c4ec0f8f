"""The corpus, its vocabulary and the batches of the bundled models."""
