"""Copy-on-write snapshots of a model's caches for a range of tokens.

    snapshot         what a snapshot holds; merge and split by rows of a batch
    take             takes one, and restores live caches from it
    per_kind         how each cache class is held; `per_kind_batch` for batches
    read_rows        reads rows of another model's caches without changing them

Nothing here knows which request a snapshot is for, or files.
"""
