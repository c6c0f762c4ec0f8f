"""Packs an EAGLE-3 head that `mlx-speculation train` has written as 16-bit numbers.

Most weights of a small target's head are its output matrix, of which each row is
for one id alone; it bears fewer bits than the layer that all drafts go through:

    python scripts/demo_training/export/pack_head.py HEAD OUT --bits 8 --output-bits 4
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

GROUP_SIZES = (64, 32)  # the first that divides the rows of a matrix
OUTPUT = "lm_head.weight"
KEPT = ("README.md", "training.json")


def pack_head(folder: Path, out: Path, bits: int, output_bits: int) -> int:
    """Write a packed copy of a head; return the bytes of its tensors.

    Args:
        folder: the head's.
        out: is made.
        bits: of matrices.
        output_bits: of the output matrix.

    Raises:
        ValueError: it is packed already.
    """
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    if any(value.dtype == mx.uint32 for value in tensors.values()):
        raise ValueError(f"{folder} is packed already. Train without --bits.")
    packed: dict[str, mx.array] = {}
    groups = set()
    for name, value in tensors.items():
        group = next((g for g in GROUP_SIZES if value.shape[-1] % g == 0), None)
        if value.ndim != 2 or group is None or not name.endswith(".weight"):
            packed[name] = value
            continue
        groups.add(group)
        own = output_bits if name == OUTPUT else bits
        parts = mx.quantize(value.astype(mx.bfloat16), group, own)
        path = name.removesuffix(".weight")
        names = (name, f"{path}.scales", f"{path}.biases")
        packed |= dict(zip(names, parts, strict=True))
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), packed, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization"] = {
        "group_size": max(groups),
        "bits": bits,
        "lm_head": {"group_size": max(groups), "bits": output_bits},
    }
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    for each in KEPT:
        if (folder / each).is_file():
            shutil.copy(folder / each, out / each)
    return sum(value.nbytes for value in packed.values())


def main() -> None:
    """Pack one head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--output-bits", type=int, default=4)
    given = parser.parse_args()
    size = pack_head(given.folder, given.out, given.bits, given.output_bits)
    print(f"{size / 1e6:.1f} MB in {given.out}")


if __name__ == "__main__":
    main()
