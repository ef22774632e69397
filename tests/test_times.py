from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence, even
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import LayerGeometry, ModelGeometry
from memkv_pp.plan.profiles import DeviceProfile
from memkv_pp.plan.times import PipelineTimes, linked, predict, stage_seconds
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.geometries import (
    full_layer,
    known_geometry,
    latent_layer,
    recurrent_layer,
    shared_layer,
    sliding_layer,
)

BF16 = parse_pair("bf16")
WEIGHTS = 1000
BANDWIDTH = 10**6
FULL = full_layer(2, 8)
ROW_BYTES = 2 * 2 * 8 * 2  # K and V, 2 heads of 8, bf16

DEVICE = DeviceProfile(
    name="slow",
    memory_bytes=1,
    bandwidth_bytes_per_s=BANDWIDTH,
    half_flops_per_s=1e12,
    single_flops_per_s=1e6,
    link="wire",
    link_bytes_per_s=2.0**20,
    link_latency_s=0.5,
    source="made up",
)
NO_LINK = replace(DEVICE, link_bytes_per_s=1e30, link_latency_s=0.0)


def model(*layers: LayerGeometry, **fields) -> ModelGeometry:
    heavy = tuple(replace(layer, weight_elements=WEIGHTS) for layer in layers)
    return ModelGeometry(name="m", family="f", layers=heavy, **fields)


def seconds(
    geometry: ModelGeometry,
    layers: range | None = None,
    *,
    profile: DeviceProfile = NO_LINK,
    pair: Pair = BF16,
    first: bool = False,
    last: bool = False,
    ctx: int = 10,
    sequences: int = 1,
    dtype_bytes: int = 2,
    spec: int = 0,
) -> float:
    return stage_seconds(
        geometry,
        (pair,) * (len(geometry.layers) + len(geometry.nextn_layers)),
        range(geometry.num_layers) if layers is None else layers,
        profile,
        first=first,
        last=last,
        context_tokens=ctx,
        sequences=sequences,
        dtype_bytes=dtype_bytes,
        options=CacheOptions(spec_tokens=spec),
    )


def test_a_step_reads_the_weights_once_and_each_sequences_rows_and_writes_one_more():
    assert seconds(model(FULL)) == (2 * WEIGHTS + 10 * ROW_BYTES + ROW_BYTES) / BANDWIDTH
    assert seconds(model(FULL), sequences=3) == (2 * WEIGHTS + 3 * 11 * ROW_BYTES) / BANDWIDTH
    assert seconds(model(FULL), spec=2) == (2 * WEIGHTS + 13 * ROW_BYTES) / BANDWIDTH


def test_a_packed_cache_is_read_as_it_lies():
    layer = full_layer(1, 32)
    packed = 34 + 24  # one q8_0 and one q5_1 group
    expected = (2 * WEIGHTS + 11 * packed) / BANDWIDTH
    assert seconds(model(layer), pair=parse_pair("q8_0:q5_1")) == expected


def test_a_sliding_layer_reads_at_most_its_window():
    geometry = model(sliding_layer(2, 8, 4))
    assert seconds(geometry, ctx=3) == (2 * WEIGHTS + 4 * ROW_BYTES) / BANDWIDTH
    assert seconds(geometry, ctx=4) == (2 * WEIGHTS + 5 * ROW_BYTES) / BANDWIDTH
    assert seconds(geometry, ctx=400) == seconds(geometry, ctx=4)


def test_a_shared_layer_reads_its_sources_rows_and_writes_none():
    own, both = seconds(model(FULL)), seconds(model(FULL, shared_layer(0)))
    assert both - own == pytest.approx((2 * WEIGHTS + 10 * ROW_BYTES) / BANDWIDTH)


def test_a_latent_layer_reads_one_row_per_token():
    row = 2 * (16 + 4)
    assert seconds(model(latent_layer(16, 4))) == (2 * WEIGHTS + 11 * row) / BANDWIDTH


def test_a_recurrent_layer_moves_its_state_in_and_out_whatever_the_context():
    layer = recurrent_layer(key_groups=1, value_heads=1, state_size=4)
    state_bytes = 4 * (12 * 3 + 16)
    geometry = model(layer)
    assert seconds(geometry) == (2 * WEIGHTS + 2 * state_bytes) / BANDWIDTH
    assert seconds(geometry, ctx=10_000, sequences=2) == (
        (2 * WEIGHTS + 4 * state_bytes) / BANDWIDTH
    )


def test_the_first_stage_looks_rows_up_and_the_last_reads_norm_and_head():
    geometry = model(
        FULL, hidden_size=5, embedding_elements=700, head_elements=300, norm_elements=11
    )
    bare = seconds(geometry)
    assert seconds(geometry, first=True) - bare == pytest.approx(2 * 5 / BANDWIDTH)
    assert seconds(geometry, last=True) - bare == pytest.approx(2 * 311 / BANDWIDTH)
    tied = replace(geometry, tied_embedding=True)
    assert seconds(tied, last=True) - bare == pytest.approx(2 * 711 / BANDWIDTH)


def test_the_operations_count_where_they_take_longer_than_the_bytes():
    weak = replace(NO_LINK, half_flops_per_s=1000.0, single_flops_per_s=100.0)
    attention = 2 * 2 * 10 * (8 + 8)
    assert seconds(model(FULL), profile=weak) == (2 * WEIGHTS + attention) / 1000
    assert seconds(model(FULL), profile=weak, sequences=4) == 4 * (2 * WEIGHTS + attention) / 1000
    assert seconds(model(FULL), profile=weak, dtype_bytes=4) == (2 * WEIGHTS + attention) / 100
    recurrent = model(recurrent_layer(key_groups=1, value_heads=1, state_size=4))
    update = 7 * 16 + 2 * 12 * 4
    assert seconds(recurrent, profile=weak) == (2 * WEIGHTS + update) / 1000


def test_attention_counts_its_query_heads_over_the_rows_it_can_see():
    weak = replace(NO_LINK, half_flops_per_s=1000.0)
    sliding = replace(sliding_layer(2, 8, 4), query_heads=6)
    assert seconds(model(sliding), profile=weak) == (2 * WEIGHTS + 2 * 6 * 4 * 16) / 1000
    reader = replace(shared_layer(0), query_heads=3)
    alone, both = (seconds(model(*x), profile=weak) for x in ((sliding,), (sliding, reader)))
    assert both - alone == pytest.approx((2 * WEIGHTS + 2 * 3 * 4 * 16) / 1000)
    latent = 2 * 10 * (16 + 4 + 16)
    assert seconds(model(latent_layer(16, 4)), profile=weak) == (2 * WEIGHTS + latent) / 1000


def test_every_stage_but_the_last_sends_its_hidden_rows_on():
    geometry = model(FULL, FULL, hidden_size=2**10)
    here, there = range(1), range(1, 2)
    sent = 3 * 2**10 * 2 / 2**20
    with_link = seconds(geometry, here, profile=DEVICE, sequences=3)
    assert with_link - seconds(geometry, here, sequences=3) == pytest.approx(0.5 + sent)
    assert seconds(geometry, there, profile=DEVICE, last=True) == seconds(
        geometry, there, last=True
    )


def test_a_link_is_as_slow_as_its_slower_end():
    fast = replace(DEVICE, link_bytes_per_s=2.0**30, link_latency_s=0.0)
    chain = linked([fast, DEVICE, fast])
    assert [p.link_bytes_per_s for p in chain] == [2.0**20, 2.0**20, 2.0**30]
    assert [p.link_latency_s for p in chain] == [0.5, 0.5, 0.0]


@given(
    cut=st.integers(1, 41),
    ctx=st.integers(1, 5000),
    sequences=st.integers(1, 64),
)
def test_the_stages_of_any_fence_move_what_one_stage_moves(cut, ctx, sequences):
    geometry = known_geometry("gemma4-e4b")
    apart = seconds(geometry, range(cut), ctx=ctx, sequences=sequences) + seconds(
        geometry, range(cut, 42), ctx=ctx, sequences=sequences
    )
    assert apart == pytest.approx(seconds(geometry, ctx=ctx, sequences=sequences))


@given(lo=st.integers(0, 40), more=st.integers(1, 3), ctx=st.integers(1, 100_000))
def test_a_layer_more_never_makes_a_stage_faster(lo, more, ctx):
    geometry = known_geometry("qwen3.5-27b")
    few = seconds(geometry, range(lo, lo + 20), ctx=ctx, profile=DEVICE)
    assert few < seconds(geometry, range(lo, lo + 20 + more), ctx=ctx, profile=DEVICE)
    assert few <= seconds(geometry, range(lo, lo + 20), ctx=ctx + 1, profile=DEVICE)


def predicted(
    fence: Fence, *profiles: DeviceProfile, sequences: int = 1, waves: int | None = None
) -> PipelineTimes:
    return predict(
        model(FULL, FULL, FULL, FULL),
        (BF16,) * 4,
        fence,
        profiles,
        context_tokens=10,
        sequences=sequences,
        dtype_bytes=2,
        options=CacheOptions(),
        waves=waves,
    )


LAYER_S = (2 * WEIGHTS + 11 * ROW_BYTES) / BANDWIDTH
WAVE_OF_3_S = (2 * WEIGHTS + 33 * ROW_BYTES) / BANDWIDTH


def test_one_sequence_passes_the_stages_one_after_another():
    times = predicted(Fence((0, 1, 4)), NO_LINK, NO_LINK)
    assert times.stage_seconds == pytest.approx((LAYER_S, 3 * LAYER_S))
    assert times.token_seconds == pytest.approx(4 * LAYER_S)
    assert times.step_seconds == pytest.approx(3 * LAYER_S)
    assert times.tokens_per_s == pytest.approx(1 / (4 * LAYER_S))
    assert (times.waves, times.wave_sequences, times.slowest_stage) == (1, 1, 1)


def test_waves_keep_the_slowest_stage_busy_and_share_the_sequences():
    times = predicted(even(4, 2), NO_LINK, NO_LINK, sequences=6)
    assert (times.waves, times.wave_sequences) == (2, 3)
    assert times.step_seconds == pytest.approx(2 * WAVE_OF_3_S)
    assert times.tokens_per_s == pytest.approx(6 / (4 * WAVE_OF_3_S))
    assert times.token_seconds == pytest.approx(4 * LAYER_S)


def test_fewer_waves_than_stages_leave_stages_idle():
    times = predicted(even(4, 4), *(NO_LINK,) * 4, sequences=3, waves=1)
    assert (times.waves, times.wave_sequences) == (1, 3)
    assert times.tokens_per_s == pytest.approx(3 / (4 * WAVE_OF_3_S))


def test_the_links_are_named_apart_and_belong_to_the_sender():
    times = predicted(even(4, 2), DEVICE, DEVICE)
    assert times.link_seconds == (0.5, 0.0)
    assert times.stage_seconds[0] - times.stage_seconds[1] == pytest.approx(0.5)


def test_a_wrong_number_of_profiles_is_refused_by_name():
    with pytest.raises(ConfigError, match="--device-profile: 1 profiles for 2 stages"):
        predicted(even(4, 2), DEVICE)
