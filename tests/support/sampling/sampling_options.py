"""Random options of mlx-lm's samplers and processors."""

from typing import Any

from hypothesis import strategies as st

PENALTIES = st.none() | st.sampled_from([0, 0.5, 1.0, 1.3, 3])
SIGNED = PENALTIES | st.sampled_from([-0.7])
SIZES = st.integers(0, 9)


@st.composite
def penalty_options(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Draw arguments of `make_logits_processors`, for ids below `vocab`."""
    ids = st.integers(0, vocab - 1)
    return {
        "logit_bias": draw(st.dictionaries(ids, st.floats(-5, 5, width=32))),
        "repetition_penalty": draw(PENALTIES),
        "repetition_context_size": draw(SIZES),
        "presence_penalty": draw(SIGNED),
        "presence_context_size": draw(SIZES),
        "frequency_penalty": draw(SIGNED),
        "frequency_context_size": draw(SIZES),
    }


@st.composite
def filter_options(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Draw arguments of `make_sampler` without temperature, for ids below `vocab`."""
    ids = st.integers(0, vocab - 1)
    return {
        "top_p": draw(st.sampled_from([0.0, 0.4, 0.8, 0.95, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.02, 0.3])),
        "min_tokens_to_keep": draw(st.sampled_from([1, 4])),
        "xtc_probability": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "xtc_threshold": draw(st.sampled_from([0.02, 0.1, 0.5])),
        "xtc_special_tokens": draw(st.lists(ids, max_size=3)),
        "top_k": draw(st.sampled_from([0, 1, 6])),
    }
