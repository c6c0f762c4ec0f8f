"""One journal for each cache class of mlx-lm and of this project.

A journal records the writes to one cache during a round, and keeps a prefix of them or
undoes all. `caches.journal` has the protocol, and `caches.registry` maps each class to
its journal. Each file is named after its cache class, except for `isolated`, which is
for `Speculation(isolated=True)`, and for `live` and `ring`, which have base classes.
"""
