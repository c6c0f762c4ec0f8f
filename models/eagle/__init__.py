"""EAGLE-3 heads: config.json, the module, loading, and which layers they read.

The head as a drafter is in the engine; other kinds of heads are not known here.
"""
