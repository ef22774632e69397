"""Rows in the orders of other engines: exact permutations, by index and by tensor."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from memkv_pp.cache import ops
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.exchange import SideRows, export_rows, import_rows
from memkv_pp.cache.kv import StageCache
from memkv_pp.errors import ConfigError, FormatError, InternalError, OutOfRecords
from memkv_pp.fence import even
from memkv_pp.formats import FORMATS, Family, Pair, parse_format, parse_pair
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.packing import pack_group, to_ggml_block
from memkv_pp.records import record_layout
from memkv_pp.row_orders import (
    RowOrder,
    record_offsets,
    rows_into_record,
    rows_of_record,
)
from memkv_pp.sizing import CacheOptions, Footprint, Layout, size_fence
from memkv_pp.wire import Rows

HEADS, SIZE = 2, 64
BLOCK = 4
GGML = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q5_1": GGMLQuantizationType.Q5_1,
    "q5_0": GGMLQuantizationType.Q5_0,
    "q4_1": GGMLQuantizationType.Q4_1,
    "q4_0": GGMLQuantizationType.Q4_0,
}
IN_SECTIONS = [name for name, fmt in FORMATS.items() if not fmt.exponent]
CASES = [(name, RowOrder.GGML) for name in GGML] + [
    (name, RowOrder.SECTIONS) for name in IN_SECTIONS
]
PAIRS = [*(f"{k}:{v}" for k, v in pairwise([*GGML, "f32"])), "q8_0:q5_1"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def a_layer():
    return LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=HEADS,
        kv_heads=HEADS,
        key_head_size=SIZE,
        value_head_size=SIZE,
    )


def sides_of(name):
    """K and V of the second layer of a record, behind another one's bytes."""
    fmt = parse_format(name)
    stored = [(0, a_layer(), parse_pair("q5_1")), (1, a_layer(), Pair(fmt, fmt))]
    layout = record_layout(stored, BLOCK)
    assert layout is not None
    k, v = layout.layers[1].k, layout.layers[1].v
    assert v is not None
    return layout.record_bytes, (k, v)


def numbered(count):
    return bytes(np.random.default_rng(7).integers(0, 256, count, dtype=np.uint8))


@pytest.mark.parametrize(("name", "order"), CASES)
def test_an_order_is_a_permutation_of_the_bytes_of_a_side(name, order):
    record_bytes, sides = sides_of(name)
    for side in sides:
        offsets = record_offsets(side, order)
        own = {
            part.offset + at for part in (side.codes, side.scales) for at in range(part.num_bytes)
        }
        assert len(offsets) == len(own)
        assert set(offsets) == own
    record = numbered(record_bytes)
    copy = bytearray(b"\xaa" * record_bytes)
    for side in sides:
        rows = rows_of_record(side, record, order)
        assert Counter(rows) == Counter(record[at] for at in record_offsets(side, order))
        rows_into_record(side, rows, order, copy)
        assert rows_of_record(side, copy, order) == rows
    kept = {at for side in sides for at in record_offsets(side, order)}
    assert all(copy[at] == (record[at] if at in kept else 0xAA) for at in range(record_bytes))


@pytest.mark.parametrize("name", [n for n in GGML if FORMATS[n].family is Family.GGML])
def test_a_row_in_ggml_order_is_the_ggml_blocks_of_its_heads(name):
    record_bytes, (side, _) = sides_of(name)
    fmt = side.format
    record = bytearray(record_bytes)
    blocks = b""
    values = np.random.default_rng(3).standard_normal((BLOCK, HEADS, SIZE)).astype(np.float32)
    for row in range(BLOCK):
        for head in range(HEADS):
            for group in range(SIZE // 32):
                elements = values[row, head, group * 32 : group * 32 + 32].tolist()
                codes, scales = pack_group(fmt, elements)
                at = head * BLOCK + row
                for part, width, some in (
                    (side.codes, fmt.code_bytes, codes),
                    (side.scales, fmt.scale_bytes, scales),
                ):
                    first = part.offset + at * part.row_bytes + group * width
                    record[first : first + width] = some
                blocks += to_ggml_block(fmt, codes, scales)
    assert rows_of_record(side, bytes(record), RowOrder.GGML) == blocks


def test_a_block_of_the_source_is_all_codes_by_token_and_then_all_scales():
    """turbo8, two tokens of two heads of 64: a head is 64 code bytes and 4 scales of two bytes."""
    layout = record_layout([(0, a_layer(), parse_pair("turbo8"))], 2)
    assert layout is not None
    offsets = record_offsets(layout.layers[0].k, RowOrder.SECTIONS)
    assert [offsets[at] for at in (0, 63, 64, 128, 192)] == [0, 63, 128, 64, 192]
    assert [offsets[256 + at] for at in (0, 7, 8, 16)] == [256, 263, 272, 264]
    assert len(offsets) == 256 + 32


def test_orders_that_a_format_cannot_have_are_refused_by_name():
    for name in ("fp8", "nvfp4", "turbo4"):
        with pytest.raises(FormatError, match=f"{name} is no type of ggml"):
            record_offsets(sides_of(name)[1][0], RowOrder.GGML)
    with pytest.raises(FormatError, match="turbo4e keeps an exponent"):
        record_offsets(sides_of("turbo4e")[1][0], RowOrder.SECTIONS)
    record_bytes, (side, _) = sides_of("q4_0")
    with pytest.raises(FormatError, match="288 bytes, got 287"):
        rows_into_record(side, bytes(287), RowOrder.GGML, bytearray(record_bytes))


def make_cache(pair, block=BLOCK, records=16, fp8_scales=UNIT_SCALES):
    model = ModelGeometry(name="made", family="made", layers=(a_layer(),) * 2)
    formats = (parse_pair(pair),) * 2
    flat = CacheOptions(layout=Layout.FLAT, flat_rows=40)
    options = CacheOptions(block_tokens=block) if block else flat
    (sizing,) = size_fence(model, formats, even(2, 1), options)
    units = Footprint(records, 0, 0)
    cache = StageCache(TorchDevice(), model, sizing, units, max_sequences=4, fp8_scales=fp8_scales)
    cache.arena.storage.fill_(0xFF)
    return cache


def grow(cache, sequence, count, seed):
    """Append rows to every layer, and return them: {layer: (K, V)}, f32 [count, H, D]."""
    start = cache.length(sequence)
    batch = cache.extend([Rows(sequence, start, count, sample=False)])
    generator = torch.Generator().manual_seed(seed)
    written = {}
    for layer, view in cache.layers.views.items():
        written[layer] = tuple(torch.randn(count, HEADS, SIZE, generator=generator) for _ in "kv")
        for side, values in zip((view.k, view.v), written[layer], strict=True):
            ops.append(side, batch.full.records, batch.full.rows, values)
    return written


def filled(pair, **options):
    """A cache where sequence 1 holds 11 rows in records out of order, and the rows themselves."""
    cache = make_cache(pair, **options)
    for sequence in (0, 1, 2):
        cache.open(sequence)
    grow(cache, 0, 9, seed=5)
    first = grow(cache, 1, 3, seed=6)
    cache.close(0)
    grow(cache, 2, 2, seed=8)
    second = grow(cache, 1, 8, seed=7)
    return cache, {
        layer: tuple(torch.cat(both) for both in zip(first[layer], second[layer], strict=True))
        for layer in first
    }


def stored(cache, sequence, layer):
    view, length = cache.layers.views[layer], cache.length(sequence)
    return [
        ops.gather(side, cache.records(sequence), torch.float32)[:, :length]
        for side in (view.k, view.v)
    ]


def test_the_records_of_these_tests_are_out_of_order():
    cache, _ = filled("f32")
    records = cache.records(1).tolist()
    assert len(records) == 3
    assert records != sorted(records)


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_in_ggml_order_are_what_gguf_packs_and_unpacks(pair):
    cache, written = filled(pair)
    exported = export_rows(cache, 1, RowOrder.GGML)
    for layer, sides in exported.items():
        for side, given, rows, read in zip(
            (cache.layers.views[layer].k, cache.layers.views[layer].v),
            sides,
            written[layer],
            stored(cache, 1, layer),
            strict=True,
        ):
            kind = GGML[side.format.name]
            flat = rows.flatten(1).numpy()
            raw = given.data.numpy()
            assert raw.tobytes() == quantize(flat, kind).tobytes()
            values = dequantize(raw, kind).reshape(11, HEADS, SIZE)
            assert np.array_equal(values, read.transpose(0, 1).numpy())


@pytest.mark.parametrize(("name", "order"), CASES)
def test_tensors_move_every_byte_as_the_offsets_say(name, order):
    cache, _ = filled(f"{name}:{name}")
    layout = cache.arena.sizing.full
    assert layout is not None
    size = layout.record_bytes
    arena = cache.arena.storage.numpy().tobytes()
    records = [arena[record * size :][:size] for record in cache.records(1).tolist()]
    exported = export_rows(cache, 1, order)
    for laid in layout.layers:
        assert laid.v is not None
        for side, given in zip((laid.k, laid.v), exported[laid.layer], strict=True):
            truth = [rows_of_record(side, record, order) for record in records]
            if order is RowOrder.GGML:
                row_bytes = len(truth[0]) // BLOCK
                assert given.data.numpy().tobytes() == b"".join(truth)[: 11 * row_bytes]
                continue
            raw = [row.numpy().tobytes() for row in given.data]
            assert raw[:2] == truth[:2]
            codes, scales = side.codes.num_bytes, side.scales.num_bytes
            live = [*range(codes * 3 // 4), *range(codes, codes + scales * 3 // 4)]
            dead = set(range(codes + scales)) - set(live)
            assert [raw[2][at] for at in live] == [truth[2][at] for at in live]
            assert {raw[2][at] for at in dead} == {0}, "rows nobody wrote leave as zeros"


@pytest.mark.parametrize(("name", "order"), CASES)
def test_rows_taken_in_are_the_rows_given_out(name, order):
    cache, _ = filled(f"{name}:{name}")
    exported = export_rows(cache, 1, order)
    other = make_cache(f"{name}:{name}")
    for sequence in (0, 1, 2):
        other.open(sequence)
    grow(other, 0, 5, seed=1)
    grow(other, 2, 1, seed=2)
    other.close(2)
    before = [side.clone() for side in stored(other, 0, 1)]
    import_rows(other, 1, 11, exported, order)
    other.check()
    assert other.length(1) == 11
    for layer in exported:
        for mine, theirs in zip(stored(other, 1, layer), stored(cache, 1, layer), strict=True):
            assert torch.equal(mine, theirs)
    for layer, sides in export_rows(other, 1, order).items():
        for mine, theirs in zip(sides, exported[layer], strict=True):
            assert torch.equal(mine.data, theirs.data)
    assert all(map(torch.equal, before, stored(other, 0, 1)))


@pytest.mark.parametrize("block", [1, 16, 0])
def test_ggml_order_does_not_know_the_size_of_a_record(block):
    cache, _ = filled("q8_0:q5_1")
    exported = export_rows(cache, 1, RowOrder.GGML)
    other = make_cache("q8_0:q5_1", block=block)
    other.open(1)
    import_rows(other, 1, 11, exported, RowOrder.GGML)
    query, key, value = torch.randn(3, 1, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    outs = []
    for target in (cache, other):
        batch = target.extend([Rows(1, 11, 1, sample=True)])
        outs.append(target.layers.attend(1, batch, query, key, value, 0.1, fixed=True))
    assert torch.equal(*outs)


def test_an_empty_sequence_gives_out_no_rows():
    cache = make_cache("q8_0:turbo3")
    cache.open(0)
    (k, v) = export_rows(cache, 0, RowOrder.SECTIONS)[1]
    assert k.data.shape == (0, BLOCK * HEADS * 68)
    assert v.data.shape == (0, BLOCK * HEADS * 28)


def test_fp8_rows_travel_with_their_scale():
    scales = Fp8Scales(layers=((2.0, 0.5),) * 2)
    cache, _ = filled("fp8", fp8_scales=scales)
    exported = export_rows(cache, 1, RowOrder.SECTIONS)
    assert [side.scale for side in exported[1]] == [2.0, 0.5]
    waiting = make_cache("fp8", fp8_scales=Fp8Scales(calibration_rows=8))
    waiting.open(1)
    import_rows(waiting, 1, 11, exported, RowOrder.SECTIONS)
    assert all(map(torch.equal, stored(waiting, 1, 0), stored(cache, 1, 0)))
    grow(waiting, 1, 1, seed=3)
    assert waiting.layers.views[0].k.fp8.value == 2.0
    other = make_cache("fp8")
    other.open(1)
    with pytest.raises(ConfigError, match=r"layer 0 K comes with the fp8 scale 2\.0"):
        import_rows(other, 1, 11, exported, RowOrder.SECTIONS)
    assert other.length(1) == 0


def test_what_does_not_fit_is_refused_and_nothing_is_taken():
    cache, _ = filled("q8_0:q5_1")
    good = export_rows(cache, 1, RowOrder.GGML)
    other = make_cache("q8_0:q5_1", records=2)
    other.open(1)

    def refused(error, match, rows=good, count=11, sequence=1, order=RowOrder.GGML):
        with pytest.raises(error, match=match):
            import_rows(other, sequence, count, rows, order)
        assert other.length(1) == 0
        other.check()

    k, v = good[1]
    refused(ConfigError, r"layers \[0\] came, this stage holds \[0, 1\]", {0: good[0]})
    refused(ConfigError, "import of 0 rows", count=0)
    refused(ConfigError, r"layer 0 K in q8_0 is uint8 \[12, 136\]", count=12)
    refused(ConfigError, r"layer 1 K .* got torch.uint8 \[11, 96\]", {**good, 1: (v, v)})
    signed = SideRows(data=k.data.view(torch.int8))
    refused(ConfigError, "layer 1 K .* got torch.int8", {**good, 1: (signed, v)})
    refused(ConfigError, "in the sections order", order=RowOrder.SECTIONS)
    refused(OutOfRecords, "full records")
    refused(InternalError, "sequence 9 is not open", sequence=9)
    few = {
        layer: (SideRows(data=k.data[:5]), SideRows(data=v.data[:5]))
        for layer, (k, v) in good.items()
    }
    import_rows(other, 1, 5, few, RowOrder.GGML)
    with pytest.raises(InternalError, match="has 5 rows"):
        import_rows(other, 1, 5, few, RowOrder.GGML)
    with pytest.raises(FormatError, match="turbo4e"):
        export_rows(filled("q8_0:turbo4e")[0], 1, RowOrder.SECTIONS)
