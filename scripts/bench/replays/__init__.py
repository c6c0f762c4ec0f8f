"""Replays of recorded texts, which measure draft length policies and lookups."""
