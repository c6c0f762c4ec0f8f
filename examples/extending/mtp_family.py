"""An MTP family of your own: how files name a head's tensors, and what the head needs.

mlx-lm has no heads for Qwen3, so this file invents one, in the naming of DeepSeek.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from mlx_speculation import MtpDraft, SpeculativeGenerator, demo_models, load
from mlx_speculation.models import MtpConvention
from mlx_speculation.models.mtp import families
from mlx_speculation.models.mtp.blocks import Block
from mlx_speculation.models.mtp.family import MtpFamily
from mlx_speculation.models.mtp.head import MtpLayer

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3


def block(args: Any, config: dict[str, Any], k: int) -> list[Block]:
    """Return the decoder blocks of layer k of the head."""
    return [Block(qwen3.TransformerBlock(args))]


family = MtpFamily(
    name="Qwen3, invented",
    modules=("qwen3",),
    rules={  # beginnings of names in files, and what they are called in `MtpHead`
        "mtp.eh_proj.": "layers.0.proj.",
        "mtp.enorm.": "layers.0.norm_e.",
        "mtp.hnorm.": "layers.0.norm_h.",
        "mtp.norm.": "layers.0.final.",
        "mtp.block.": "layers.0.blocks.0.",
    },
    convention=MtpConvention(hidden="before_norm"),
    build=block,
)
families.FAMILIES += (family,)


def save_random_head(folder: Path, args: Any) -> None:
    """Write a head in the family's layout beside the target's weights."""
    layer: Any = MtpLayer(args.hidden_size, args.rms_norm_eps, block(args, {}, 0))
    names = {"proj": "eh_proj", "norm_e": "enorm", "norm_h": "hnorm", "final": "norm"}
    flat: Any = tree_flatten(layer.parameters())
    weights: dict[str, mx.array] = {}
    for path, weight in flat:
        part, _, rest = path.partition(".")
        file_name = names.get(part, "block")
        rest = rest.removeprefix("0.") if part == "blocks" else rest
        weights[f"mtp.{file_name}.{rest}"] = weight
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)


temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name, "target")
shutil.copytree(demo_models()["dense"], folder)
model, tokenizer = load(folder)
save_random_head(folder, model.args)

draft = MtpDraft.from_folder(folder, model, convention=family.convention)
generator = SpeculativeGenerator(model, tokenizer, draft=draft, draft_length=2)
result = generator.generate("import os\n", max_tokens=20)
plain = generator.generate("import os\n", max_tokens=20, draft_length=0)

assert result.tokens == plain.tokens
assert not result.stats.drafter_faults
print(f"{result.stats.drafted} tokens drafted by a random head")
temporary.cleanup()
