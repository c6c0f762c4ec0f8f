"""DFlash drafters: config.json, the module, its context cache, loading.

The model as a drafter is in the engine; other kinds of heads are not known here.
"""
