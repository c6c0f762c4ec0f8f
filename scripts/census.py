"""Writes the page of supported architectures.

It is made from tests/support/models/census.json.

    PYTHONPATH=tests python scripts/census.py docs/architectures.md
"""

import sys
from pathlib import Path
from typing import Any

from mlx_speculation.models.mtp.families import family_of
from mlx_speculation.models.source_digests import MLX_LM_VERSION
from support.models import census

PAGE = """# Supported architectures

Written by `scripts/census.py docs/architectures.md`; a test checks that it is
current.

Every architecture of mlx-lm {version} that can be built here was built tiny with random
weights (tests/support/models/census.json), and decoded greedily and sampled, plainly
and with drafts that are right, wrong and mixed. Those with "no drafts" in the last
column were decoded greedily and plainly only. The texts with drafts equal the plain
ones, [up to near-ties](exactness.md).

There are {count}. In {bitwise} of them, a forward over four tokens gives bit for bit
the logits of four forwards over one token (the column "bit for bit"), with the stock
BLAS of the Linux CPU wheel in float32. With another BLAS, dtype or device expect
near-ties in all of them.

The columns "caches" and "window" are those of the tiny models; a published model has
more layers and a larger window. The column "a part is kept by" says how the accepted
part of a draft is kept: "rows" where every layer holds rows and drops the last ones;
"replay" where recurrent layers are taken from their old state to the accepted prefix.
MTP heads are those that `draft="mtp"` knows. Every architecture takes a draft model, a
lookup and drafters of your own, except those with "no drafts" in the last column.
EAGLE-3, P-EAGLE, DFlash, DFlash2 and DSpark read the states between the target's
layers; where a target does not show them, as deepseek_v41, gemma3n, iquestloopcoder and
nanbeige, they are refused with an `UnsupportedModelError`. `mlx-speculation pair`
with `--draft` tries it.

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
                    "yes" if row.bitwise else "no",
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


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
