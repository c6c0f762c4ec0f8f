"""Saving caches to files and loading them: our own format and mlx-lm's.

Reading trusts nothing: sizes, offsets, dtypes and the relations between fields are
checked before a cache is built, and a file is loaded as a whole or refused. Nothing
here knows rounds, models or requests.
"""
