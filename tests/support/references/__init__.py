"""Draft heads and drafters in plain numpy, written from published facts alone.

They know nothing of the library or of mlx: what they return is what the library is
compared with. Everything is computed in float64, over a whole history in one pass,
without caches. Weights are [out, in], under the names they have on disk.
"""
