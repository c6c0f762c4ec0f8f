"""Cache classes of our own, and conversions from and to mlx-lm's.

They hold keys and values in a layout that is cheaper to roll back or to batch. How a
round on them is undone is in `caches.journals`; models and drafters are not known.
"""
