"""Which layers of a Gemma 4 store and reuse keys and values, in transformers 5.23.

It refuses models all of whose layers reuse what others store, which assistants are,
and stores nothing where no layer of a target itself reuses it. With this in place of
`Gemma4TextConfig.kv_sharing_modes` both work as their docstrings say.
"""

from typing import Any, cast

from transformers import Gemma4TextConfig

_USUAL = cast(property, Gemma4TextConfig.kv_sharing_modes).fget


def _modes(config: Any) -> Any:
    count, kinds = config.num_hidden_layers, config.layer_types
    if config.num_kv_shared_layers == count:
        return ["reuse"] * count
    if config.num_kv_shared_layers == 0:
        last = {kind: index for index, kind in enumerate(kinds)}
        return ["store" if i in last.values() else None for i in range(count)]
    assert _USUAL is not None
    return _USUAL(config)


KV_SHARING_MODES = property(_modes)
