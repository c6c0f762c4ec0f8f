"""One journal for each cache class of mlx-lm, and for our own.

A journal follows what is written to one cache during a round and keeps a prefix of it
or takes all of it back. `caches.journal` has the protocol and `caches.registry` says
which class has which journal; each file here is named by the class it is for.
`isolated` and `checked_writes` serve `Speculation(isolated=True)`, and several journals
share `live` and `ring`. A journal knows its own cache alone: no other layer, no model.
"""
