"""Traces of real rounds, and their replay through draft length policies."""
