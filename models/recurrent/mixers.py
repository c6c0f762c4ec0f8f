"""The recurrent mixers of mlx-lm 0.32.2, and how each is replayed.

The table has every class that writes to an `ArraysCache`. A test reads mlx-lm's source
and fails if a class is missing. The array arguments of these classes have positions on
axis 1, and the cache has all their state between calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mlx_speculation.models.recurrent.chunked_delta import gated_delta_in_chunks
from mlx_speculation.models.recurrent.replay import (
    ConvsAndScan,
    LastKeyAndValue,
    Recipe,
    RgLru,
    Scan,
    TokenIds,
)


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """Replay of one mixer class."""

    recipe: Recipe | None = None  # None: the mixer runs again
    # (module, name) of other objects it relies on; a test checks their source
    relies_on: tuple[tuple[str, str], ...] = ()


def _gated_delta(slot: int) -> Scan:
    rows = dict.fromkeys(("q", "k", "v", "a", "b"), 1)
    home = "mlx_lm.models.gated_delta"
    name, ours = "gated_delta_update", gated_delta_in_chunks
    return Scan(home, name, slot, "state", rows, in_chunks=ours)


def _gated_delta_after(*convs: str) -> ConvsAndScan:
    """Return a recipe; the state of the scan is in the slot after the convolutions'."""
    slots = {path: slot for slot, path in enumerate(convs)}
    return ConvsAndScan(slots, _gated_delta(len(convs)))


def _lightning(module: str) -> Scan:
    rows = dict.fromkeys(("q", "k", "v"), 2)
    return Scan(f"mlx_lm.models.{module}", "recurrent_gla", 0, "h", rows)


_SSM = Scan(
    "mlx_lm.models.ssm",
    "ssm_update",
    1,
    "state",
    dict.fromkeys(("hidden_states", "B", "C", "dt"), 1),
    called_in="_ssm",
)
_MAMBA_2 = Mixer(ConvsAndScan({"conv1d": 0}, _SSM))
_SHORT_CONV = Mixer(ConvsAndScan({"conv": 0}))
_KIMI_CONV = (("mlx_lm.models.kimi_linear", "ShortConv1d"),)

_TABLE = {
    "baichuan_m1.Attention": Mixer(LastKeyAndValue("_custom_convolution")),
    "bailing_hybrid.LinearAttention": Mixer(
        ConvsAndScan(scan=_lightning("bailing_hybrid"))
    ),
    "bailing_moe_linear.LinearAttention": Mixer(
        ConvsAndScan(scan=_lightning("bailing_moe_linear"))
    ),
    "bailing_moe_v3.BailingKDA": Mixer(
        _gated_delta_after("q_conv1d", "k_conv1d", "v_conv1d")
    ),
    "falcon_h1.FalconH1Mixer": _MAMBA_2,
    "gear.ConvKVGatedMixer": Mixer(ConvsAndScan({"key_conv": 0, "value_conv": 1})),
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer": _MAMBA_2,
    "jamba.JambaMambaMixer": Mixer(),
    "kimi_k3.KimiK3DeltaAttention": Mixer(
        _gated_delta_after("qkv_conv.conv"), _KIMI_CONV
    ),
    "kimi_linear.KimiDeltaAttention": Mixer(
        _gated_delta_after("q_conv.conv", "k_conv.conv", "v_conv.conv"), _KIMI_CONV
    ),
    "lfm2.ShortConv": _SHORT_CONV,
    "lfm2_moe.ShortConv": _SHORT_CONV,
    "longcat_flash_ngram.NgramEmbedding": Mixer(TokenIds()),
    "mamba.MambaBlock": Mixer(),
    "mamba2.Mamba2Block": _MAMBA_2,
    "nemotron_h.NemotronHMamba2Mixer": _MAMBA_2,
    "olmo_hybrid.GatedDeltaNet": Mixer(
        _gated_delta_after("q_conv1d", "k_conv1d", "v_conv1d")
    ),
    "plamo2.Mamba": _MAMBA_2,
    "qwen3_5.GatedDeltaNet": Mixer(_gated_delta_after("conv1d")),
    "qwen3_next.Qwen3NextGatedDeltaNet": Mixer(_gated_delta_after("conv1d")),
    "recurrent_gemma.RecurrentBlock": Mixer(
        RgLru(),
        (
            ("mlx_lm.models.recurrent_gemma", "Conv1d"),
            ("mlx_lm.models.recurrent_gemma", "RGLRU"),
            ("mlx_lm.models.recurrent_gemma", "rnn_scan"),
        ),
    ),
    "rwkv7.Rwkv7ChannelMixing": Mixer(),
    "rwkv7.Rwkv7TimeMixing": Mixer(),
}


def _place(dotted: str) -> tuple[str, str]:
    module, name = dotted.split(".")
    return f"mlx_lm.models.{module}", name


# (module, class) -> the replay of this class.
MIXERS: Mapping[tuple[str, str], Mixer] = MappingProxyType(
    {_place(dotted): mixer for dotted, mixer in _TABLE.items()}
)

# The same for modules that write to other kinds of caches.
COMPRESSORS: Mapping[tuple[str, str], Mixer] = MappingProxyType(
    {("mlx_lm.models.deepseek_v41", "Compressor"): Mixer()}
)
