"""Print every architecture of mlx-lm as a table, with what was measured just now.

Each one is built tiny with random weights (tests/support/models/census.json) and
decoded plainly and with drafts, greedily and sampled; the texts have to be the same.

    PYTHONPATH=tests python scripts/census.py
    PYTHONPATH=tests python scripts/census.py llama gear --tokens 120
    PYTHONPATH=tests python scripts/census.py --page docs/architectures.md

With --page nothing is run: it writes the page of supported architectures from the table
that the tests hold each of the tiny models to.

Columns: the caches that make_prompt_cache returns; how a part of a round is kept
("rows" where every layer holds rows and drops the last ones, "replay" of recurrent
layers, "rerun" of the model); whether four rows in one forward are bit for bit four
forwards of one row on this machine; and the verdict: how many texts were compared and
how many of them parted at a near-tie. A second table has what cannot run, and why. The
last line is one JSON object.
"""

import argparse
import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_speculation.caches import leaves
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import check_causal
from mlx_speculation.models.mtp.families import family_of
from mlx_speculation.models.source_digests import MLX_LM_VERSION
from support.identity import Compared, check_identity, plain_text, prompt_of
from support.models import census

PROMPT = 40  # tokens, longer than every window
COLUMNS = ("architecture", "caches", "a part is kept by", "bitwise here", "identity")


def main() -> None:
    """Measure the architectures that were asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="modules of mlx_lm.models; all if none"
    )
    parser.add_argument("--tokens", type=int, default=60, help="length of each text")
    parser.add_argument("--page", type=Path, help="write the page, and run nothing")
    options = parser.parse_args()
    if options.page is not None:
        options.page.write_text(page(), encoding="utf-8")
        return
    names = options.names or [*census.BUILT]
    rows = []
    print(_line(COLUMNS), _line(["---"] * len(COLUMNS)), sep="\n")
    for name in names:
        rows.append(measure(name, options.tokens))
        print(_line(rows[-1]), flush=True)
    print("\n| cannot run here | reason |\n| --- | --- |")
    for name, missing in census.NOT_BUILT.items():
        print(_line([name, missing.reason]))
    print(json.dumps(_summary(rows)))


def measure(name: str, tokens: int) -> list[str]:
    """Return one row of the table."""
    model, prompt = census.build(name), prompt_of(PROMPT)
    bitwise = not census.widths_differ(model, prompt, plain_text(model, prompt, 24))
    caches = census.BUILT[name].caches
    try:
        check_causal(model)
    except InvalidRequestError:
        return [name, caches, "", _yes(bitwise), "no drafts: its rows are mixed"]
    try:
        seen = check_identity(
            model, prompt, draft_length=4, tokens=tokens, bitwise=bitwise
        )
    except AssertionError as error:
        return [name, caches, "", _yes(bitwise), f"DIFFERENT: {error}"]
    return [name, caches, _kept_by(model, seen), _yes(bitwise), _verdict(seen)]


PAGE = """# Supported architectures

Written by `scripts/census.py --page docs/architectures.md`; a test checks that it is
current.

Every architecture of mlx-lm {version} that can be built here was built tiny with random
weights (tests/support/models/census.json), and decoded greedily and sampled, plainly
and with drafts that are right, wrong and mixed. All texts were equal, up to near-ties
where the column "bit for bit" says no ([What "the same" means](exactness.md)).

There are {count} of them. In {bitwise} four rows in one forward are bit for bit four
forwards of one row, on the Linux CPU wheel in float32.

How a part of a round is kept: "rows" where every layer holds rows and drops the last
ones; "replay" where recurrent layers are taken from their old state to the accepted
prefix. MTP heads are those that `draft="mtp"` knows. Any architecture but those marked
takes a draft model, a lookup and drafters of your own.

{table}

## Not tried

| architecture | why |
| --- | --- |
{missing}
"""


def page() -> str:
    """Return the page of supported architectures."""
    header = ("architecture", "caches", "window", "a part is kept by", "bit for bit")
    lines = [_line([*header, "MTP heads", ""]), _line(["---"] * 7)]
    for name, row in census.BUILT.items():
        family = family_of(f"mlx_lm.models.{name}")
        lines.append(
            _line(
                [
                    name,
                    row.caches,
                    str(row.window or ""),
                    "replay" if "ArraysCache" in row.caches else "rows",
                    _yes(row.bitwise),
                    "" if family is None else family.name,
                    "" if row.unequal is None else f"no drafts: {row.unequal}",
                ]
            )
        )
    return PAGE.format(
        version=MLX_LM_VERSION,
        count=len(census.BUILT),
        bitwise=sum(row.bitwise for row in census.BUILT.values()),
        table="\n".join(lines),
        missing="\n".join(
            _line([name, missing.reason]) for name, missing in census.NOT_BUILT.items()
        ),
    )


def _kept_by(model: nn.Module, seen: Compared) -> str:
    if seen.reruns:
        return "rerun"
    found = [leaf for _, leaf in leaves(make_prompt_cache(model))]
    recurrent = any(isinstance(leaf, ArraysCache) for leaf in found)
    return "replay" if recurrent else "rows"


def _verdict(seen: Compared) -> str:
    ties = f", {seen.near_ties} near-ties" if seen.near_ties else ""
    return f"{seen.texts} texts equal{ties}"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _summary(rows: list[list[str]]) -> dict[str, Any]:
    return {
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "device": str(mx.default_device()),
        "architectures": len(rows),
        "different": [row[0] for row in rows if row[4].startswith("DIFFERENT")],
        "kept_by": Counter(row[2] for row in rows),
        "bitwise": sum(row[3] == "yes" for row in rows),
        "cannot_run": sorted(census.NOT_BUILT),
    }


if __name__ == "__main__":
    main()
