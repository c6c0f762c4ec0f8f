"""Copy-on-write snapshots of a model's caches for a range of tokens.

`snapshot` has what is held, `take` takes and restores, `per_kind` says how each class
is held. Nothing here knows which request a snapshot is for, or files.
"""
