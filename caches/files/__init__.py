"""Saving caches to files and loading them: mlx-lm's layout, with more metadata.

    save, load     the entry points; `fit` says whether a file fits live caches
    mlx_lm_format  the layouts of mlx-lm 0.32 and 0.31
    extension      metadata for what these cannot say: tokens, the drafter, a digest
    fields, tree   a cache as plain fields, and lists of caches as trees of them
    codecs         which cache classes a file can hold; `field_checks` checks each
    safetensors_*  the file itself

Reading trusts nothing: sizes, offsets, dtypes and the relations between fields are
checked before a cache is built, and a file is loaded as a whole or refused. Nothing
here knows rounds, models or requests.
"""

from mlx_speculation.caches.files.load import LoadedCaches, load_caches, load_into
from mlx_speculation.caches.files.save import save_caches

__all__ = ["LoadedCaches", "load_caches", "load_into", "save_caches"]
