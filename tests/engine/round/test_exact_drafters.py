"""In exact mode, tokens and logprobs are equal bit for bit with every drafter."""

from collections.abc import Sequence

import pytest

from support.covering import covering
from support.exact_drafters import PAIRS, SAMPLINGS, compare_pair, compared
from support.processes.blas_processes import with_openblas

pytestmark = pytest.mark.usefixtures("on_the_cpu")

# A head with one token a forward, a block, a cascade; all kinds of target layers.
QUICK = [
    ("mtp, hybrid", "sampled"),
    ("dflash, dense", "greedy"),
    ("lookup and eagle, sliding", "greedy"),
]
EVERY = [(name, chosen) for name in PAIRS for chosen in SAMPLINGS]


@with_openblas
@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_no_drafter_changes_a_bit(cases: Sequence[tuple[str, str]]) -> None:
    for case, differences in zip(cases, compared(cases), strict=True):
        assert differences.tokens == differences.logprobs == 0, case
        assert differences.control > 0, case
        assert differences.accepted >= 7, case
        assert differences.rejected >= 5, case


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chosen"), covering(PAIRS, SAMPLINGS))
def test_nor_with_the_stock_blas(name: str, chosen: str) -> None:
    differences = compare_pair(name, SAMPLINGS[chosen], seed=1)
    assert differences.tokens == differences.logprobs == 0
    assert differences.accepted >= 7
