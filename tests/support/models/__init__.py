"""Tiny models, tokenizers and checkpoints that tests build."""
