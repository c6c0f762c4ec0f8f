"""Draft heads and drafters in plain numpy, written from published facts alone.

The library is compared with their results, so they use neither the library nor mlx.
Everything is computed in float64, over a whole history in one pass, without caches.
Weights are [out, in], under their names on disk.
"""
