"""Prompts for a training, made of texts that are on this machine."""
