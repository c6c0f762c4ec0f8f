"""Snapshots of a model's caches for a range of tokens.

    snapshot         defines a snapshot; joins and cuts snapshots
    take             takes a snapshot, and restores live caches from it
    per_kind         defines what is saved of each class
    read_rows        reads rows of the target's caches, for a drafter

The package does not know requests or files.
"""
