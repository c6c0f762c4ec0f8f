"""Saving caches to files and loading them: mlx-lm's layout, with more metadata.

    save, load     the entry points; `fit` checks a file against live caches
    mlx_lm_format  the layouts of mlx-lm 0.32 and 0.31
    extension      further metadata: tokens, the drafter, a digest
    kinds          the cache classes in files; `field_checks` checks their fields
    safetensors_*  reading and writing safetensors files

The reader trusts no file: it checks sizes, offsets, dtypes and the relations between
fields before it builds a cache.
"""

from mlx_speculation.caches.files.load import LoadedCaches, load_caches
from mlx_speculation.caches.files.save import save_caches

__all__ = ["LoadedCaches", "load_caches", "save_caches"]
