"""What a `CacheList` presents: a list of what its members present."""

from collections.abc import Sequence

from mlx_lm.models.cache import CacheList

from mlx_speculation.caches.journal import Journal


class MemberJournals:
    """The journals of a `CacheList`'s members, each of which moves by itself.

    Attributes:
        members: one journal per member, or a list of such where lists are nested.
        presented: a `CacheList` of what the members present.
    """

    def __init__(self, members: "Sequence[Journal | MemberJournals]") -> None:
        self.members = tuple(members)
        self.presented: CacheList = CacheList(
            *(member.presented for member in self.members)
        )
