"""Training of the bundled demo models, from text to checkpoint."""
