"""One journal for each cache class of mlx-lm, and for our own.

A journal follows what is written to one cache during a round and keeps a prefix of it
or takes all of it back; `caches.journal` has the protocol, `caches.registry` says which
class has which journal. A journal knows its own cache alone: no other layer, no model.
"""
