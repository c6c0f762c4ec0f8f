"""A node holds the rows of all roles; the tree agrees with a table of stored prefixes.

A role is a target, a draft model, or a head whose rows depend on one to three later
tokens. A request can lack a role, and a role can lack the last tokens.
"""

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_speculation.caches import PrefixCache
from support.caches.prefix_roles import RING, ROWS, Kind, bound, request, snapshots

KINDS = {
    "rows": (ROWS, ROWS, Kind(lag=1), Kind(lag=3)),
    "ring and rows": (RING, ROWS, Kind(lag=2)),
    "rows and ring": (ROWS, RING, Kind(lag=1)),
    "rings": (RING, RING, Kind(lag=2), Kind(lag=3)),
    "heads": (ROWS, Kind(lag=1), Kind(lag=2), Kind(lag=3)),
}
Text = tuple[list[int], tuple[int | None, ...]]

TEXTS: st.SearchStrategy[list[Text]] = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=14),
        # the number of last tokens that each role lacks; None: the text lacks the role
        st.tuples(st.integers(0, 2), *[st.none() | st.integers(0, 5)] * 3),
    ),
    min_size=1,
    max_size=8,
)

# The third text is the second without its last token, and ends one token after a
# restore point.
PARTED: list[Text] = [
    ([0], (0, None, None, None)),
    ([1, 0, 1, 2, 0, 0, 1, 0, 0, 0], (2, 0, None, None)),
    ([1, 0, 1, 2, 0, 0, 1, 0, 0], (0, 0, None, None)),
]


def roles_of(kinds: tuple[Kind, ...], text: Text) -> dict[int, tuple[Kind, int]]:
    pairs = enumerate(zip(kinds, text[1], strict=False))
    return {
        w: (kind, left_out) for w, (kind, left_out) in pairs if left_out is not None
    }


def beginnings(tokens: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(tokens[:stop]) for stop in range(1, len(tokens) + 1))


def check_nodes(prefixes: PrefixCache, kinds: tuple[Kind, ...]) -> None:
    for node in prefixes._tree.nodes():
        assert 0 in node.rows
        assert node.points.keys() <= node.rows.keys()
        assert node.children or 0 in node.points or not kinds[0].stateful
        for which, rows in node.rows.items():
            lag = kinds[which].lag
            places = (max(0, node.start - lag), max(0, node.stop - lag))
            assert (rows.start, rows.stop) == places
    kept = snapshots(prefixes)
    arrays = [x for each in kept for leaf in each.leaves for x in leaf.arrays()]
    assert len({id(array) for array in arrays}) == len(arrays)  # none is shared
    assert prefixes.nbytes == sum(array.nbytes for array in arrays)
    assert prefixes.nbytes <= prefixes.max_bytes


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(texts=TEXTS)
@example(texts=PARTED)
def test_what_a_role_finds_is_what_a_table_says(name: str, texts: list[Text]) -> None:
    kinds = KINDS[name]
    prefixes, _owners = bound(1 << 30, *kinds)
    # for each role, the prefixes at whose ends it can be resumed
    table: dict[int, set[tuple[int, ...]]] = {
        which: set() for which in range(len(kinds))
    }
    for tokens, left_out in texts:
        played = request(prefixes, tokens, roles_of(kinds, (tokens, left_out)))
        for which, (reused, places) in played.items():
            kind = kinds[which]
            known = [len(x) for x in beginnings(tokens[:-1]) if x in table[which]]
            known = [stop for stop in known if stop > kind.lag]
            assert reused == max(known, default=0), which
            table[which] |= {tuple(tokens[:place]) for place in places}
        check_nodes(prefixes, kinds)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(texts=TEXTS, max_bytes=st.integers(0, 1600))
def test_the_budget_is_kept_and_all_roles_go_together(
    name: str, texts: list[Text], max_bytes: int
) -> None:
    kinds = KINDS[name]
    prefixes, _owners = bound(max_bytes, *kinds)
    for text in texts:
        request(prefixes, text[0], roles_of(kinds, text))
        check_nodes(prefixes, kinds)
    prefixes.clear()
    assert prefixes.nbytes == 0 == len(snapshots(prefixes))
