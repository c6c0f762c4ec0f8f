"""Replays of recorded texts: by draft length policies, and by lookups."""
