"""References of draft heads and drafters, written from published facts alone.

The library is compared with their results, so `blocks` and `mtp` do not use it. They
compute in numpy and float64, over a whole history in one pass, without caches. Only the
decoder layers of MTP heads are those of transformers or mlx-lm. Weights are [out, in],
under their names on disk. The modules `*_oracles` have heads that know the text
instead.
"""
