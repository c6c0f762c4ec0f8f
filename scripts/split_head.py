"""Takes the MTP head out of the shards of a model, into mtp.safetensors.

The new folder holds the model without its head, which mlx-lm alone can load, and the
head beside it, where `draft="mtp"` and `draft="auto"` find it. All tensors stay what
they are, byte by byte. The last line on standard output is one JSON object.

    python scripts/split_head.py path/of/model path/of/new/folder
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from mlx_speculation.cli import run

app = typer.Typer(add_completion=False)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="A model with a head in its shards.")],
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
) -> None:
    """Split a head out of a model's shards."""
    from mlx_speculation.models.mtp.split import SIDECAR, split_head

    done = split_head(folder, out)
    print(f"{len(done.head)} tensors of the head are in {done.folder / SIDECAR}")
    print(f"{done.trunk} tensors of the model are in its shards")
    print(f"norms of the head: {done.norms or 'not known; a probe tells'}")
    record = {"head": len(done.head), "model": done.trunk, "norms": done.norms}
    print(json.dumps(record))


if __name__ == "__main__":
    run(app)
