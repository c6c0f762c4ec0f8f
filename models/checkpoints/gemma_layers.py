"""The arguments of Gemma 4's decoder layers in a drafter's config.json.

The functions raise `ModelFolderError` for a rotation that is not understood.
"""

from dataclasses import replace
from typing import Any

from mlx_lm.models import gemma4_text

from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_part,
    number,
)
from mlx_speculation.models.checkpoints.rotation import (
    FULL,
    SLIDING,
    Rotation,
    check_rotation,
    read_rotation,
)

_USUAL = {
    FULL: Rotation(1e6, "proportional", 0.25),
    SLIDING: Rotation(1e4),
}


def gemma_args(config: Config, name: str) -> gemma4_text.ModelArgs | None:
    """Return mlx-lm's arguments of a drafter's Gemma 4 layers.

    All layers have full attention, no shared keys and values, no experts and no
    per-layer inputs. None: the drafter has layers of another kind.
    """
    part = layer_part(config)
    names = f"{config.get('architectures')} {part.get('model_type')}"
    if "gemma4" not in names.lower():
        return None
    fields: dict[str, Any] = {
        "layer_types": [FULL] * number(part, "num_hidden_layers", name, 1),
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    made = gemma4_text.ModelArgs.from_dict({**part, **fields})
    return with_rotations(made, config, name)


def with_rotations(
    args: gemma4_text.ModelArgs, config: Config, name: str
) -> gemma4_text.ModelArgs:
    """Return the arguments with the rotation of each kind of layer added.

    mlx-lm reads only `rope_parameters` with an entry for each kind. It ignores a theta
    under any other key, and takes a default.
    """
    by_kind = {}
    for kind in sorted(set(args.layer_types or ())):
        rotation = read_rotation(config, name, kind, usual=_USUAL[kind])
        size = (kind == FULL and args.global_head_dim) or args.head_dim
        positions = args.max_position_embeddings
        check_rotation(rotation, name, dims=size, positions=positions)
        by_kind[kind] = rotation.parameters
    return replace(args, rope_parameters=by_kind)
