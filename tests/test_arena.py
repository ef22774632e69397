"""The arena: its bytes are what sizing said, and every part lies where the layout says."""

import pytest
import torch

from memkv_pp.cache.arena import Arena
from memkv_pp.cache.device import TorchDevice
from memkv_pp.errors import InternalError
from memkv_pp.fence import even
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.sizing import CacheOptions, Footprint, Layout, size_fence
from memkv_pp.testing.geometries import (
    full_layer,
    known_geometry,
    latent_layer,
    recurrent_layer,
    sliding_layer,
)

POISON = 0xFF


def model(*layers):
    return ModelGeometry(name="made", family="made", layers=layers)


FULL = full_layer(2, 32)
MIXED = model(
    FULL,
    sliding_layer(1, 64, 8),
    recurrent_layer(key_groups=1, value_heads=2, state_size=4),
    full_layer(3, 32),
)


def stage_sizing(geometry, kv="q8_0:q5_1", stages=1, stage=0, **options):
    pairs = (parse_pair(kv),) * (len(geometry.layers) + len(geometry.nextn_layers))
    fence = even(geometry.num_layers, stages)
    return size_fence(geometry, pairs, fence, CacheOptions(**options))[stage]


def full_layout(sizing):
    assert sizing.full is not None
    return sizing.full


def poisoned(sizing, units):
    arena = Arena(TorchDevice(), sizing, units)
    arena.storage.fill_(POISON)
    return arena


@pytest.mark.parametrize(
    ("geometry", "options", "units"),
    [
        pytest.param(model(FULL), {}, Footprint(3, 0, 0), id="full"),
        pytest.param(model(FULL), {"block_tokens": 24}, Footprint(5, 0, 0), id="blocks of 24"),
        pytest.param(model(FULL), {"ring": False}, Footprint(0, 0, 0), id="no units"),
        pytest.param(
            model(FULL), {"layout": Layout.FLAT, "flat_rows": 50}, Footprint(2, 0, 0), id="flat"
        ),
        pytest.param(MIXED, {}, Footprint(3, 5, 4), id="windows and states"),
        pytest.param(MIXED, {"ring": False}, Footprint(3, 0, 2), id="windows without rings"),
        pytest.param(model(latent_layer(64, 32)), {}, Footprint(7, 0, 0), id="latent"),
        pytest.param(known_geometry("gemma4-e4b"), {}, Footprint(2, 3, 0), id="gemma4-e4b"),
    ],
)
@pytest.mark.parametrize("kv", ["q8_0:q5_1", "f32", "bf16:q4_0"])
def test_the_storage_has_the_bytes_that_sizing_says(geometry, options, units, kv):
    sizing = stage_sizing(geometry, kv, **options)
    arena = Arena(TorchDevice(), sizing, units)
    assert arena.allocated_bytes == sizing.bytes_of(units)
    assert arena.allocated_bytes == arena.storage.untyped_storage().nbytes()
    arena.check()


def test_a_stage_without_any_cached_layer_has_an_empty_arena():
    recurrent = recurrent_layer(key_groups=1, value_heads=1, state_size=4)
    arena = Arena(TorchDevice(), stage_sizing(model(recurrent, FULL), stages=2), Footprint())
    assert arena.allocated_bytes == 0
    arena.check()


def parts_of(layout):
    sides = [side for layer in layout.layers for side in (layer.k, layer.v) if side is not None]
    return [part for side in sides for part in (side.codes, side.scales) if part.row_bytes]


def test_parts_of_all_pools_touch_their_own_bytes_and_no_others():
    sizing, units = stage_sizing(MIXED), Footprint(3, 5, 4)
    arena = poisoned(sizing, units)
    window_base = units.full_records * sizing.record_bytes
    pools = (
        (arena.full_part, sizing.full, 0, units.full_records),
        (arena.window_part, sizing.window, window_base, units.window_records),
    )
    writer = 0
    owners = torch.full((arena.allocated_bytes,), POISON, dtype=torch.uint8)
    for view_of, layout, base, records in pools:
        for part in parts_of(layout):
            view = view_of(part)
            assert view.shape == (records, part.heads, part.rows, part.row_bytes)
            view.fill_(writer)
            for record in range(records):
                assert layout is not None
                begin = base + record * layout.record_bytes + part.offset
                span = owners[begin : begin + part.num_bytes]
                assert (span == POISON).all(), "two parts share bytes"
                span.fill_(writer)
            writer += 1
    assert writer == 12
    assert torch.equal(arena.storage, owners)
    state_base = window_base + units.window_records * sizing.window_record_bytes
    assert (arena.storage[state_base:] == POISON).all()
    assert arena.allocated_bytes - state_base == units.state_slots * sizing.slot_bytes > 0


def test_a_row_of_a_part_lies_at_head_times_rows_plus_row():
    sizing = stage_sizing(MIXED)
    arena = poisoned(sizing, Footprint(2, 2, 0))
    side = full_layout(sizing).layers[1].v
    assert side is not None
    part = side.scales
    arena.full_part(part)[1, 2, 5] = torch.arange(part.row_bytes, dtype=torch.uint8)
    begin = sizing.record_bytes + part.offset + (2 * part.rows + 5) * part.row_bytes
    expected = torch.full((arena.allocated_bytes,), POISON, dtype=torch.uint8)
    expected[begin : begin + part.row_bytes] = torch.arange(part.row_bytes)
    assert torch.equal(arena.storage, expected)


def test_parts_of_a_pool_without_records_are_empty():
    sizing = stage_sizing(MIXED)
    window = sizing.window
    assert window is not None
    arena = Arena(TorchDevice(), sizing, Footprint(1, 0, 0))
    assert arena.window_part(window.layers[0].k.codes).shape[0] == 0


def test_use_is_counted_by_pool():
    arena = Arena(TorchDevice(), stage_sizing(MIXED), Footprint(3, 5, 4))
    arena.full.allocate(2)
    arena.window.allocate(1)
    arena.state.allocate(4)
    assert arena.used() == Footprint(2, 1, 4)


def test_an_arena_may_be_released_twice_and_then_holds_nothing():
    arena = Arena(TorchDevice(), stage_sizing(MIXED), Footprint(3, 5, 4))
    arena.full.allocate(2)
    arena.release()
    arena.release()
    assert (arena.allocated_bytes, arena.used()) == (0, Footprint())
    arena.check()
    with pytest.raises(InternalError, match="was released"):
        _ = arena.storage


def test_a_release_frees_every_pool_and_then_reports_the_first_that_does_not_balance():
    arena = Arena(TorchDevice(), stage_sizing(MIXED), Footprint(3, 5, 4))
    arena.state.allocate(1)
    for pool in (arena.window, arena.state):
        pool._free.pop()
    with pytest.raises(InternalError, match="pool window records: held 0 \\+ free 4"):
        arena.release()
    assert (arena.allocated_bytes, arena.used()) == (0, Footprint())
    arena.release()


def test_a_storage_of_another_size_breaks_the_equation():
    sizing, units = stage_sizing(MIXED), Footprint(3, 5, 4)
    arena = Arena(TorchDevice(), sizing, units)
    sized = sizing.bytes_of(units)
    arena._bytes = torch.empty(sized - 1, dtype=torch.uint8)
    with pytest.raises(InternalError, match=f"sized {sized} == allocated {sized - 1}"):
        arena.check()


def test_a_pool_that_does_not_balance_breaks_the_check():
    arena = Arena(TorchDevice(), stage_sizing(MIXED), Footprint(3, 5, 4))
    arena.full._free.pop()
    with pytest.raises(InternalError, match="pool full records: held 0"):
        arena.check()


def test_records_beyond_two_gibibytes_are_reached():
    # The pages of the arena are never touched but for two records: it costs no memory.
    sizing = stage_sizing(model(FULL), "f32")
    records = 2**31 // sizing.record_bytes + 2
    arena = Arena(TorchDevice(), sizing, Footprint(records, 0, 0))
    part = full_layout(sizing).layers[0].k.codes
    view = arena.full_part(part)
    view[torch.tensor([records - 1]), :, torch.tensor([3])] = torch.full(
        (1, 2, 128), 5, dtype=torch.uint8
    )
    begin = (records - 1) * sizing.record_bytes + part.offset + 3 * part.row_bytes
    assert begin > 2**31
    assert arena.storage[begin : begin + part.row_bytes].tolist() == [5] * 128
    assert (view.index_select(0, torch.tensor([records - 1]))[0, :, 3] == 5).all()
