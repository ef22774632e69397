"""A stage's cache against an oracle that keeps every row in Python, and its attention against f64."""

import random

import pytest
import torch

from memkv_pp.cache import batch as batch_module
from memkv_pp.cache import ops
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.cache.rotation import rotate as rotate_tensor
from memkv_pp.errors import ConfigError, InternalError, OutOfRecords
from memkv_pp.fence import even
from memkv_pp.formats import FORMATS, parse_format, parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.packing import pack_group, unpack_group
from memkv_pp.packing_groups import exponent_byte
from memkv_pp.rotation import rotate
from memkv_pp.sizing import CacheOptions, Footprint, Layout, size_fence
from memkv_pp.wire import Rows

POISON = 0xFF
HEADS = 2
# Every format on each side, with every block size and the flat layout among them.
NAMES = tuple(FORMATS)
PAIRS = [(f"{k}:{NAMES[(i + 5) % len(NAMES)]}", (16, 1, 24, 0)[i % 4]) for i, k in enumerate(NAMES)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attention_layer(kv_heads, key_size, value_size):
    return LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=kv_heads,
        kv_heads=kv_heads,
        key_head_size=key_size,
        value_head_size=value_size,
    )


def options_of(block):
    if block:
        return CacheOptions(block_tokens=block)
    return CacheOptions(layout=Layout.FLAT, flat_rows=64)


def make(layers=None, pair="f32", block=16, records=64, sequences=4):
    """A cache whose arena is poisoned: 0xFF bytes are NaN in every format that has one."""
    chosen = tuple(layers or (attention_layer(HEADS, 32, 64),) * 2)
    model = ModelGeometry(name="made", family="made", layers=chosen)
    formats = (parse_pair(pair),) * len(chosen)
    (sizing,) = size_fence(model, formats, even(len(chosen), 1), options_of(block))
    units = Footprint(records, 0, 0)
    cache = StageCache(TorchDevice(), model, sizing, units, max_sequences=sequences)
    cache.arena.storage.fill_(POISON)
    return cache


def full_rows(batch):
    """What a batch is to the full records."""
    assert batch.full is not None
    return batch.full


def layouts(cache):
    return cache.arena.sizing.full.layers


def stored(cache, layer, segment):
    """(K, V) of a segment's sequence as the arena holds them, f32 [H, L, D]."""
    view = ops.layer_view(cache.arena, layouts(cache)[layer])
    return tuple(
        ops.gather(side, segment.records, torch.float32)[:, : segment.length]
        for side in (view.k, view.v)
    )


class TruthSide:
    """One side of one head of a sequence through the plain-Python packing, row after row."""

    def __init__(self, name, record_rows):
        self.format = parse_format(name)
        self.record_rows = record_rows
        self.exponent = 127
        self.rows = []

    def append(self, row):
        fmt = self.format
        if fmt.rotated:
            row = rotate(row)
        if fmt.exponent and len(self.rows) % self.record_rows == 0:
            self.exponent = exponent_byte(row)
        values = []
        for at in range(0, len(row), fmt.group):
            packed = pack_group(fmt, row[at : at + fmt.group], exponent=self.exponent)
            values += unpack_group(fmt, *packed, exponent=self.exponent)
        self.rows.append(values)


def attend_oracle(query_THD, key_HLD, value_HLD, scale):
    """Causal softmax attention of the last T of L rows, in f64, one head at a time."""
    num_rows, query_heads, _ = query_THD.shape
    heads, length, _ = key_HLD.shape
    group = query_heads // heads
    out = []
    for head in range(query_heads):
        key, value = key_HLD[head // group].double(), value_HLD[head // group].double()
        rows = []
        for t in range(num_rows):
            seen = length - num_rows + t + 1
            weights = torch.softmax(key[:seen] @ query_THD[t, head].double() * scale, 0)
            rows.append(weights @ value[:seen])
        out.append(torch.stack(rows))
    return torch.stack(out, 1)


def step(cache, entries, generator, dtype=torch.float32, group=1, fixed=False, size=1.0):
    """Run rows of (sequence, start, count) through every layer: the batch, inputs and outputs.

    Keys and values are normal with a sigma of ``size``.
    """
    batch = cache.extend(
        [Rows(sequence, start, count, False) for sequence, start, count in entries]
    )
    num_rows = len(batch.positions)
    made = []
    for layout in layouts(cache):
        key = torch.randn(num_rows, layout.k.heads, layout.k.head_size, generator=generator)
        value = torch.randn(num_rows, layout.v.heads, layout.v.head_size, generator=generator)
        shape = (num_rows, group * layout.k.heads, layout.k.head_size)
        query = torch.randn(shape, generator=generator)
        tensors = tuple(t.to(dtype) for t in (query, key * size, value * size))
        out = cache.layers.attend(layout.layer, batch, *tensors, 0.2, fixed=fixed)
        made.append((*tensors, out))
    return batch, made


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "block"), PAIRS)
def test_a_random_walk_keeps_every_row_as_packed(pair, block):
    seed = PAIRS.index((pair, block))
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers = [attention_layer(2, 64, 128), attention_layer(1, 128, 64)]
    cache = make(layers, pair, block, records=120 if block == 1 else 12, sequences=3)
    names = pair.split(":")
    record_rows = cache.arena.sizing.options.record_rows
    oracle = {}
    reused = 0
    for opened in range(14):
        if len(oracle) == 3:
            victim = dice.choice(list(oracle))
            cache.close(victim)
            del oracle[victim]
            reused += 1
        cache.open(opened)
        oracle[opened] = [
            [[TruthSide(name, record_rows) for _ in range(layout.k.heads)] for name in names]
            for layout in layouts(cache)
        ]
        chosen = dice.sample(list(oracle), dice.randint(1, len(oracle)))
        entries = [(s, cache.length(s), dice.randint(1, 7)) for s in chosen]
        # Rows of many sizes: an exponent that came from another row would show.
        batch, made = step(cache, entries, generator, size=10.0 ** dice.randint(-3, 1))
        for layer, (_, key, value, out) in enumerate(made):
            assert not out.isnan().any()
            for segment, (sequence, _, _) in zip(full_rows(batch).segments, entries, strict=True):
                rows = slice(segment.first, segment.first + segment.num_rows)
                for heads, values in zip(oracle[sequence][layer], (key, value), strict=True):
                    for row in values[rows].tolist():
                        for truth, head in zip(heads, row, strict=True):
                            truth.append(head)
        cache.check()
        for segment, (sequence, _, _) in zip(full_rows(batch).segments, entries, strict=True):
            assert cache.length(sequence) == segment.length
            for layer in range(len(made)):
                for side, found in enumerate(stored(cache, layer, segment)):
                    expected = torch.tensor([head.rows for head in oracle[sequence][layer][side]])
                    assert torch.equal(found, expected)
    assert reused >= 10
    for sequence in list(oracle):
        cache.close(sequence)
    cache.check()
    assert (cache.num_sequences, sum(cache.used_bytes())) == (0, 0)


@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("pair", ["f32", "q8_0:q5_1", "fp8:bf16", "turbo4e:nvfp4e"])
@pytest.mark.parametrize("fixed", [False, True])
def test_what_lay_in_the_arena_before_does_not_change_a_bit(poison, pair, fixed):
    def outputs(byte):
        cache = make([attention_layer(HEADS, 64, 128)] * 2, pair)
        cache.arena.storage.fill_(byte)
        generator = torch.Generator().manual_seed(1)
        for sequence in (0, 1):
            cache.open(sequence)
        _, first = step(cache, [(0, 0, 7), (1, 0, 2)], generator, fixed=fixed)
        _, then = step(cache, [(1, 2, 1), (0, 7, 1)], generator, fixed=fixed)
        return [out for *_, out in (*first, *then)]

    for found, expected in zip(outputs(poison), outputs(0x55), strict=True):
        assert not found.isnan().any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_freed_record_never_shows_in_the_next_sequence(fixed):
    cache = make(layers=[attention_layer(1, 32, 32)], records=2)

    def run(sequence, start, count, codeword):
        batch = cache.extend([Rows(sequence, start, count, False)])
        rows = torch.full((count, 1, 32), codeword)
        out = cache.layers.attend(0, batch, rows, rows, rows, 1.0, fixed=fixed)
        return out, stored(cache, 0, full_rows(batch).segments[0])

    cache.open(0)
    for start in (0, 16):
        run(0, start, 16, 7.0)
    cache.close(0)
    cache.open(1)
    for start, count in ((0, 3), (3, 1), (4, 14)):
        out, held = run(1, start, count, 3.0)
        assert (out - 3.0).abs().max() < 1e-5
        assert {x for side in held for x in side.flatten().tolist()} == {3.0}
    assert (cache.arena.storage.view(torch.float32) == 7.0).any(), (
        "the old rows must still be there"
    )


def test_a_wrong_start_is_refused_and_nothing_is_taken():
    cache = make(records=4)
    for sequence in (0, 1):
        cache.open(sequence)
    cache.extend([Rows(0, 0, 5, False)])
    for wrong in ([Rows(1, 0, 20, False), Rows(0, 4, 1, False)], [Rows(0, 6, 1, False)]):
        with pytest.raises(InternalError, match="sequence 0 has 5 rows, the plan starts at"):
            cache.extend(wrong)
    assert [cache.length(0), cache.length(1), cache.arena.full.num_used] == [5, 0, 1]
    cache.check()


def test_a_sequence_that_comes_twice_in_a_step_is_refused_and_nothing_is_taken():
    cache = make()
    cache.open(0)
    with pytest.raises(InternalError, match="comes twice"):
        cache.extend([Rows(0, 0, 1, False), Rows(0, 0, 1, False)])
    assert (cache.length(0), cache.arena.full.num_used) == (0, 0)
    cache.check()


def test_an_empty_pool_refuses_a_step_and_nothing_is_taken():
    cache = make(records=2)
    for sequence in (0, 1):
        cache.open(sequence)
    with pytest.raises(OutOfRecords, match="3 of 2 wanted"):
        cache.extend([Rows(0, 0, 16, False), Rows(1, 0, 17, False)])
    assert [cache.length(0), cache.length(1), cache.arena.full.num_used] == [0, 0, 0]
    cache.check()


def test_a_flat_record_refuses_more_rows_than_the_context():
    cache = make(block=0)
    cache.open(0)
    with pytest.raises(ConfigError, match="--ctx: 65 rows"):
        cache.extend([Rows(0, 0, 65, False)])
    cache.check()


def test_sequences_that_are_not_open_or_open_already_are_refused():
    cache = make(sequences=1)
    cache.open(5)
    for call in (lambda: cache.open(5), lambda: cache.close(6), lambda: cache.length(6)):
        with pytest.raises(InternalError, match=r"sequence [56] is"):
            call()
    with pytest.raises(OutOfRecords, match="sequence slots"):
        cache.open(6)
    cache.check()


def test_rows_go_to_records_in_order_and_blocks_start_anew():
    cache = make(block=16)
    for sequence in (0, 1):
        cache.open(sequence)
    cache.extend([Rows(0, 0, 15, False), Rows(1, 0, 1, False)])
    batch = cache.extend([Rows(1, 1, 1, False), Rows(0, 15, 3, False)])
    assert batch.positions.tolist() == [1, 15, 16, 17]
    assert full_rows(batch).records.tolist() == [1, 0, 2, 2]
    assert full_rows(batch).rows.tolist() == [1, 15, 0, 1]
    assert cache.extend([]).positions.tolist() == []


def test_a_part_of_a_batch_is_padded_with_rows_that_write_nothing():
    cache = make()
    for sequence in (0, 1):
        cache.open(sequence)
    batch = cache.extend([Rows(0, 0, 5, False), Rows(1, 0, 4, False)])
    part = cache.part(batch, 3, 8, 8)
    assert part.positions.tolist() == [3, 4, 0, 1, 2, 0, 0, 0]
    assert full_rows(part).records.tolist() == [0, 0, 1, 1, 1]
    assert [(s.first, s.num_rows, s.length) for s in full_rows(part).segments] == [
        (0, 2, 5),
        (2, 3, 3),
    ]
    ones = torch.ones(8, 2, 64)
    out = cache.layers.attend(0, part, ones[..., :32], ones[..., :32], ones, 1.0, fixed=True)
    assert out[:, 0, 0].tolist()[5:] == [0.0, 0.0, 0.0]
    view = ops.layer_view(cache.arena, layouts(cache)[0])
    for side in (view.k, view.v):
        written = (side.codes != POISON).any(-1).all(1)
        assert written.nonzero().tolist() == [[0, 3], [0, 4], [1, 0], [1, 1], [1, 2]]


def test_a_device_length_that_differs_is_found():
    cache = make()
    cache.open(3)
    cache.extend([Rows(3, 0, 4, False)])
    cache._lengths[cache._tables[3].slot] = 5
    with pytest.raises(InternalError, match="sequence 3: device length 5 != host length 4"):
        cache.check()


def test_a_table_that_lost_a_record_is_found():
    cache = make()
    cache.open(3)
    cache.extend([Rows(3, 0, 20, False)])
    cache._tables[3].full.pop()
    with pytest.raises(
        InternalError, match=r"units in tables \(1, 0, 0\) != references \(2, 0, 0\)"
    ):
        cache.check()


def test_records_on_the_wrong_table_are_found():
    cache = make()
    for sequence in (3, 4):
        cache.open(sequence)
        cache.extend([Rows(sequence, 0, 20, False)])
    cache._tables[3].full.append(cache._tables[4].full.pop())
    with pytest.raises(
        InternalError, match=r"sequence 3: units \(3, 0, 0\) for 20 rows, sizing says \(2, 0, 0\)"
    ):
        cache.check()


def test_a_cache_may_be_released_twice():
    cache = make()
    cache.open(0)
    cache.extend([Rows(0, 0, 20, False)])
    cache.release()
    cache.release()
    assert (cache.num_sequences, cache.arena.allocated_bytes) == (0, 0)
    cache.check()


SHAPES = [(1, 64, 64), (3, 64, 32), (8, 128, 128), (3, 80, 64), (1, 128, 80)]


@pytest.mark.parametrize(("group", "key_size", "value_size"), SHAPES)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)])
def test_attention_is_the_causal_softmax_of_the_stored_rows(
    group, key_size, value_size, fixed, dtype, bound
):
    cache = make(layers=[attention_layer(2, key_size, value_size)], pair="bf16:f32")
    generator = torch.Generator().manual_seed(5)
    for sequence in (0, 1):
        cache.open(sequence)
    # Prefill, a chunk after history beside a first chunk, decode.
    for entries in ([(0, 0, 9)], [(0, 9, 3), (1, 0, 13)], [(1, 13, 1), (0, 12, 1)]):
        batch, ((query, _, _, out),) = step(cache, entries, generator, dtype, group, fixed)
        assert out.dtype is dtype
        for segment in full_rows(batch).segments:
            rows = slice(segment.first, segment.first + segment.num_rows)
            key, value = stored(cache, 0, segment)
            expected = attend_oracle(query[rows], key, value, 0.2)
            assert (out[rows].double() - expected).abs().max() < bound


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("pair", ["turbo8e:turbo4", "turbo4:f32", "bf16:turbo3e", "turbo2:turbo2e"])
def test_attention_over_rotated_rows_is_that_over_the_rows_turned_back(pair, fixed):
    assert rotated_attention_error(pair, fixed) < 1e-5


def rotated_attention_error(pair, fixed=False):
    """The largest difference of attention over a cache from that over its rows turned back."""
    cache = make([attention_layer(2, 128, 64)], pair)
    generator = torch.Generator().manual_seed(6)
    sides = parse_pair(pair)
    worst = 0.0
    for sequence in (0, 1):
        cache.open(sequence)
    for entries in ([(0, 0, 9)], [(0, 9, 8), (1, 0, 13)], [(1, 13, 1), (0, 17, 1)]):
        batch, ((query, _, _, out),) = step(cache, entries, generator, group=3, fixed=fixed)
        for segment in full_rows(batch).segments:
            rows = slice(segment.first, segment.first + segment.num_rows)
            key, value = (
                rotate_tensor(held, inverse=True) if side.rotated else held
                for side, held in zip((sides.k, sides.v), stored(cache, 0, segment), strict=True)
            )
            expected = attend_oracle(query[rows], key, value, 0.2)
            worst = max(worst, (out[rows].double() - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("bookend", ["rotate_query", "unrotate_output"])
def test_the_gate_of_rotated_attention_goes_red_without_a_bookend(monkeypatch, bookend):
    monkeypatch.setattr(ops, bookend, lambda side, rows: rows)
    assert rotated_attention_error("turbo8:turbo8") > 0.1


def test_a_record_keeps_the_exponents_of_its_first_row():
    cache = make([attention_layer(2, 64, 64)], "turbo4e:nvfp4e", records=4)
    cache.open(0)
    view = ops.layer_view(cache.arena, layouts(cache)[0])

    def write(start, count, sizes):
        batch = cache.extend([Rows(0, start, count, False)])
        rows = torch.ones(count, 2, 64) * torch.tensor(sizes)[:, None]
        cache.layers.attend(0, batch, rows, rows, rows, 1.0, fixed=False)
        return [side.exponents[:2, :, 0, 0].tolist() for side in (view.k, view.v)]

    # K is rotated before its exponents are chosen: only the ratio of its heads is plain to see.
    k, v = write(0, 1, [4.0, 0.5])
    assert v == [[127, 124], [POISON, POISON]]
    assert k[0][0] - k[0][1] == 3
    assert write(1, 15, [64.0, 64.0]) == [k, v]
    k, v = write(16, 2, [64.0, 4.0])
    assert v == [[127, 124], [131, 127]]
    assert k[1][0] - k[1][1] == 4


def test_sequences_are_unpacked_in_groups_of_bounded_size(monkeypatch):
    def outputs(rows_at_a_time):
        monkeypatch.setattr(batch_module, "GATHER_ROWS", rows_at_a_time)
        cache, generator = make(pair="q8_0:q5_1"), torch.Generator().manual_seed(2)
        for sequence in range(4):
            cache.open(sequence)
        batch, made = step(cache, [(0, 0, 40), (1, 0, 3), (2, 0, 17), (3, 0, 1)], generator)
        return [g.starts for g in full_rows(batch).gathers], [out for *_, out in made]

    starts, together = outputs(1000)
    assert starts == [(0, 48, 64, 96)]
    starts, apart = outputs(48)
    assert starts == [(0,), (0, 16), (0,)]
    for found, expected in zip(apart, together, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


FIXED_SHAPES = [(1, 64, 64), (3, 64, 64), (8, 128, 128), (3, 80, 32)]
LENGTHS = (5, 127, 128, 129, 300)


def fixed_case(group, key_size, value_size, length, dtype):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(length, 2 * group, key_size, generator=generator).to(dtype)
    key = torch.randn(2, length, key_size, generator=generator).to(dtype)
    value = torch.randn(2, length, value_size, generator=generator).to(dtype)
    return query, key, value


def rows_agree(group, key_size, value_size, length, dtype, attend=ops.attend_fixed):
    """Whether the last rows alone have the bits they have in blocks of every other cut."""
    query, key, value = fixed_case(group, key_size, value_size, length, dtype)

    def block(first, last):
        return attend(query[first:last], key[:, :last], value[:, :last], key_size**-0.5)

    first = max(length - 16, 0)
    alone = torch.cat([block(row, row + 1) for row in range(first, length)])
    whole = block(first, length)
    odd = torch.cat([block(a, min(a + 7, length)) for a in range(first, length, 7)])
    end = max(length - 3, 1)
    moved = block(max(end - 16, 0), end)[-(end - first) :]
    return (
        torch.equal(alone, whole)
        and torch.equal(alone, odd)
        and torch.equal(alone[: end - first], moved)
    )


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("group", "key_size", "value_size"), FIXED_SHAPES)
def test_fixed_attention_gives_a_row_the_same_bits_in_any_company(
    group, key_size, value_size, length, dtype, threads
):
    torch.set_num_threads(threads)
    assert rows_agree(group, key_size, value_size, length, dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("group", "key_size", "value_size"), FIXED_SHAPES)
def test_fixed_attention_is_the_causal_softmax(group, key_size, value_size, length):
    query, key, value = fixed_case(group, key_size, value_size, length, torch.float32)
    query = query[-16:]
    found = ops.attend_fixed(query, key, value, key_size**-0.5)
    expected = attend_oracle(query, key, value, key_size**-0.5)
    assert (found.double() - expected).abs().max() < 2e-6


def unmasked(query, key, value, scale):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_causal_mask", lambda n, _, keys, *options: torch.ones(n, keys).bool())
        return ops.attend_fixed(query, key, value, scale)


def without_query_padding(query, key, value, scale):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "FIXED_ROWS", len(query))
        return ops.attend_fixed(query, key, value, scale)


def without_key_padding(query, key, value, scale):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "FIXED_KEYS", key.shape[1])
        return ops.attend_fixed(query, key, value, scale)


@pytest.mark.parametrize(
    "fault", [unmasked, without_query_padding, without_key_padding, ops.attend]
)
def test_the_gate_of_fixed_attention_goes_red(fault):
    cases = [(*shape, length) for shape in FIXED_SHAPES for length in LENGTHS]
    assert not all(rows_agree(*case, torch.float32, fault) for case in cases)
