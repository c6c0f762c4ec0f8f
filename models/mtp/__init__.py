"""MTP heads: finding their tensors, loading them, their convention and their caches.

`family` says what a family of heads is and `families` is the table; `convention` has
what no tensor shows. The head as a drafter is in the engine.
"""
