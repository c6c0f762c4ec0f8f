"""In exact mode, kept rows of rounds equal those of plain decoding bit for bit.

A control runs without exact mode: with OpenBLAS, rows of rounds then differ.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_speculation.caches import FixedShape, KVQuantization
from mlx_speculation.errors import UnsupportedCacheError, UnsupportedModelError
from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.models.lanes.fixed_shape import TRIED, check_fixed_shape
from support.covering import others_slow
from support.fixed_shape import (
    MODULES,
    PROMPT,
    SHAPE,
    Round,
    compared,
    differing,
    kept_rows,
    rounds_of,
    text_of,
    with_openblas_in_front,
)
from support.models import census
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.processes.blas_processes import with_openblas
from support.processes.reader import Reader

pytestmark = pytest.mark.usefixtures("on_the_cpu")

NAMES = [name for name, module in MODULES.items() if module in TRIED]
OTHERS = sorted(TRIED & census.BUILT.keys() - {*MODULES.values()})
REFUSED = ["mamba", "rwkv7"]
# One model for each kind of cache and layer.
KINDS = ["llama", "qwen3_5", "nemotron_h", "llama(sliding)", "deepseek_v3(MLA)"]

rounds_drawn = st.lists(
    st.integers(0, 7).flatmap(
        lambda drafted: st.builds(Round, st.just(drafted), st.integers(0, drafted))
    ),
    max_size=12,
)


def test_each_model_that_counts_as_tried_is_tried_here() -> None:
    not_tried = census.BUILT.keys() - TRIED
    assert {MODULES[name] for name in NAMES} | {*OTHERS} == TRIED
    assert {*NAMES, *REFUSED} == {*MODULES}
    assert not_tried == {
        "afm7",
        "deepseek_v41",
        "jamba",
        "llama4",
        "mamba",
        "minimax_m3_vl",
        "phi3small",
        "rwkv7",
    }


@with_openblas
@pytest.mark.parametrize(
    ("names", "length", "seeds"),
    [
        (KINDS, 40, [1]),
        pytest.param(NAMES, 120, range(4), marks=pytest.mark.slow),
        pytest.param(OTHERS, 72, range(2), marks=pytest.mark.slow),
    ],
)
def test_no_row_differs_where_rows_of_a_round_differ_otherwise(
    names: Sequence[str], length: int, seeds: Sequence[int], reader: Reader
) -> None:
    differences = compared(reader, names, length, seeds)
    assert [*differences] == [*names]
    for name, (exact, control, rows) in differences.items():
        assert rows == len(seeds) * (length - PROMPT)
        assert exact == 0, name
        assert control > rows / 3, name


@settings(max_examples=2)
@given(rounds=rounds_drawn, prompt=st.integers(1, 40))
@pytest.mark.parametrize("name", others_slow(KINDS, ["qwen3_5", "llama(sliding)"]))
def test_no_row_differs_whatever_is_drafted(
    name: str, rounds: list[Round], prompt: int
) -> None:
    model, text = build(name), text_of(42)
    hooks = ModelHooks(model)
    plain = kept_rows(model, text, (), prompt=prompt)
    assert differing(plain, kept_rows(model, text, rounds, prompt=prompt)) == 0
    hooks.remove()


@pytest.mark.slow
@given(rounds=rounds_drawn)
@pytest.mark.parametrize("name", NAMES)
def test_no_row_of_any_model_differs(name: str, rounds: list[Round]) -> None:
    model, text = build(name), text_of(80)
    hooks = ModelHooks(model)
    plain = kept_rows(model, text, ())
    assert differing(plain, kept_rows(model, text, rounds)) == 0
    hooks.remove()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "llama(sliding)"])
def test_no_row_differs_in_bfloat16(name: str) -> None:
    model, text = build(name), text_of(44)
    model.update(
        tree_map(
            lambda x: x.astype(mx.bfloat16) if x.dtype == mx.float32 else x,
            model.parameters(),
        )
    )
    hooks = ModelHooks(model)
    plain = kept_rows(model, text, ())
    assert differing(plain, kept_rows(model, text, rounds_of(3, 40))) == 0
    hooks.remove()


@pytest.mark.parametrize("start", [0, 13])
def test_no_row_differs_with_quantized_caches(start: int) -> None:
    """Rows before `start` see plain keys, and later rows see quantized keys."""
    wide = {**TINY_MODELS["llama"].args, "head_dim": 32}
    model, text = build_tiny(replace(TINY_MODELS["llama"], args=wide)), text_of(60)
    quantization = KVQuantization(bits=8, group_size=32, start=start)
    plain = kept_rows(model, text, (), quantization=quantization)
    for prompt in (1, 7, 30):
        drafted = kept_rows(
            model, text, rounds_of(1, 60), quantization=quantization, prompt=prompt
        )
        both = plain.keys() & drafted.keys()
        assert len(both) >= 30
        assert not any(plain[at].tobytes() != drafted[at].tobytes() for at in both)


@pytest.mark.parametrize("prompt", [1, 8, 21, 33])
def test_a_row_does_not_depend_on_where_the_prompt_ends(prompt: int) -> None:
    model, text = build("llama(sliding)"), text_of(48)
    whole = kept_rows(model, text, (), prompt=1)
    part = kept_rows(model, text, (), prompt=prompt)
    assert all(whole[at].tobytes() == part[at].tobytes() for at in part)


# Deliberate faults, which the tests above would detect. One more fault, a view that is
# too large, changes bits on GPUs only: see test_fixed_view.py.


def test_padding_that_is_kept_is_found() -> None:
    model, text = build("llama"), text_of(30)
    plain = kept_rows(model, text, ())
    lane = Lane(model, shape=SHAPE)
    lane.feed(text[:PROMPT])
    with lane.begin() as lane_round:
        lane_round.forward(mx.array(text[PROMPT : PROMPT + 1]))
        lane_round.commit(SHAPE.rows)
    lane.seen = PROMPT + 1  # the cache holds padding as well
    lane._unknown = SHAPE.rows - 1
    with lane.begin() as lane_round:
        logits = lane_round.forward(mx.array(text[PROMPT + 1 : PROMPT + 2]))
        assert logits[0].tolist() != plain[PROMPT + 1].tolist()


@pytest.mark.slow
@with_openblas
def test_a_prompt_in_one_forward_is_found() -> None:
    (differing_rows,) = with_openblas_in_front("compare_wide_prompt('llama', 40, 29)")
    assert int(differing_rows) > 0


def test_a_scan_over_several_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan over several rows differs in its last bits from a scan of single rows."""
    model, text = build("nemotron_h"), text_of(40)
    hooks = ModelHooks(model)
    plain = kept_rows(model, text, ())
    monkeypatch.setattr(
        "mlx_speculation.models.recurrent.call_notes.rows_in_exact_mode", lambda: 0
    )
    assert differing(plain, kept_rows(model, text, rounds_of(1, 40))) > 0
    hooks.remove()


@pytest.mark.parametrize("name", REFUSED)
def test_a_mixer_that_only_runs_again_is_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(UnsupportedModelError, match="can only run again"):
        check_fixed_shape(model)
    hooks = ModelHooks(model)
    lane = Lane(model, shape=SHAPE)
    with pytest.raises(UnsupportedModelError, match="run again over 4 rows"):
        lane.feed([1, 2, 3, 4])
    assert lane.seen == 0
    hooks.remove()


def test_a_mixer_whose_source_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("qwen3_5")
    check_fixed_shape(model)
    home = "mlx_lm.models.qwen3_5.gated_delta_update"
    monkeypatch.setattr(home, lambda *args, **named: None)
    with pytest.raises(UnsupportedModelError, match="not that of the supported"):
        check_fixed_shape(model)


def test_a_ring_is_refused_before_anything_is_touched() -> None:
    model = build("llama(sliding)")
    caches = make_prompt_cache(model)
    assert RotatingKVCache in map(type, caches)
    with pytest.raises(UnsupportedCacheError, match="with_slack"):
        Lane(model, caches, shape=SHAPE)
    Lane(model, sliding="slack", shape=SHAPE)


def test_a_round_ends_where_the_view_does() -> None:
    lane = Lane(build("llama"), shape=FixedShape(4, 6))
    room = []
    for _ in range(5):
        room.append(lane.room)
        lane.feed(text_of(40)[lane.seen : lane.seen + lane.room])
    assert room == [4, 2, 4, 2, 4]
