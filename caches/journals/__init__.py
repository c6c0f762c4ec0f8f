"""One journal for each cache class of mlx-lm and of this project.

A journal follows the writes to one cache during a round, and keeps a prefix of them or
undoes all. `caches.journal` has the protocol, and `caches.registry` maps each class to
its journal. Each file here is named after its class. `isolated` serves
`Speculation(isolated=True)`; several journals share `live` and `ring`.
"""
