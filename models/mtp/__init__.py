"""MTP heads: finding and loading them, their training convention and their caches.

`family` defines a family of heads, and `families` lists all of them.
"""

from mlx_speculation.models.mtp.cache import BatchHeadCache, HeadCache, MtpCache
from mlx_speculation.models.mtp.files import is_split_head
from mlx_speculation.models.mtp.head import Mtp, MtpHead
from mlx_speculation.models.mtp.load import find_mtp_head
from mlx_speculation.models.mtp.load_with_convention import (
    load_mtp_head,
    usual_convention,
)
from mlx_speculation.models.mtp.rounds import HeadRound, beneath

__all__ = [
    "BatchHeadCache",
    "HeadCache",
    "HeadRound",
    "Mtp",
    "MtpCache",
    "MtpHead",
    "beneath",
    "find_mtp_head",
    "is_split_head",
    "load_mtp_head",
    "usual_convention",
]
