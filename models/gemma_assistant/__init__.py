"""Gemma 4 assistants: config.json, the module, loading, the target's KV they read.

The assistant as a drafter is in the engine; other kinds of heads are not known here.
"""
