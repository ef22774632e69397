"""A stage's cache with every kind of layer, against an oracle that keeps every row in plain torch."""

import itertools
import random

import pytest
import torch

from memkv_pp.cache import cuda_ops, host_attention, host_kernels
from memkv_pp.cache.cuda_kernels import CudaKernels
from memkv_pp.cache.cuda_recurrent import SCAN, conv_kernel, scan_kernel
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.cache.recurrent import CudaKernelRecurrent
from memkv_pp.errors import ConfigError, InternalError, NotResident, OutOfRecords, OutOfSlots
from memkv_pp.fence import explicit
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.sizing import CacheOptions, Footprint, Layout, size_fence
from memkv_pp.testing.emulated import EmulatedLauncher
from memkv_pp.testing.geometries import (
    full_layer,
    latent_layer,
    recurrent_layer,
    shared_layer,
    sliding_layer,
)
from memkv_pp.testing.plain_cache import PlainCache
from memkv_pp.wire import Rows

POISON = 0xFF
LONGEST = 400


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def conv_layer(channels, kernel):
    return LayerGeometry(kind=LayerKind.SHORT_CONV, conv_channels=channels, conv_kernel=kernel)


def model_of(*layers):
    return ModelGeometry(name="made", family="made", layers=layers)


class Walker:
    """The stages of a model beside the oracle: every step goes through both, layer by layer."""

    def __init__(self, model, cuts, options, pairs=None, attention=None, sequences=6, seed=0):
        self.model, self.options = model, options
        formats = pairs or (parse_pair("f32"),) * model.num_layers
        self.stages = []
        for sizing in size_fence(model, formats, explicit(cuts, model.num_layers), options):
            units = sizing.footprint(LONGEST).times(sequences)
            stage = StageCache(
                TorchDevice(), model, sizing, units, max_sequences=sequences, attention=attention
            )
            stage.arena.storage.fill_(POISON)
            assert stage.arena.allocated_bytes == sizing.bytes_of(units)
            self.stages.append(stage)
        self.plain = PlainCache(model, formats)
        self.lengths = {}
        self.taps = {
            index: torch.randn(
                layer.conv_channels,
                layer.conv_kernel,
                generator=torch.Generator().manual_seed(index),
            )
            for index, layer in enumerate(model.layers)
            if layer.kind is LayerKind.SHORT_CONV
        }
        self.generator = torch.Generator().manual_seed(seed)
        self.next = 0

    def open(self):
        for stage in self.stages:
            stage.open(self.next)
        self.lengths[self.next] = 0
        self.next += 1
        return self.next - 1

    def close(self, sequence):
        for stage in self.stages:
            stage.close(sequence)
        del self.lengths[sequence]

    def rewind(self, sequence, length):
        """Whether every stage went back; none does if one refuses."""
        if not all(stage.can_rewind_to(sequence, length) for stage in self.stages):
            return False
        for stage in self.stages:
            stage.rewind(sequence, length)
        self.plain.rewind(sequence, length)
        self.lengths[sequence] = length
        return True

    def step(self, counts, split=None):
        """Rows of {sequence: count} through all layers: the largest difference from the oracle.

        ``split``: the batch is run in two parts that meet at that row, each with padding behind it.
        """
        rows = [Rows(s, self.lengths[s], n, False) for s, n in counts.items()]
        batches = [stage.extend(rows) for stage in self.stages]
        total = sum(counts.values())
        self.plain.rows = list(counts.items())
        inputs = [self.inputs(layer, total) for layer in range(self.model.num_layers)]
        expected = [self.call(layer, self.plain, made) for layer, made in enumerate(inputs)]
        worst = 0.0
        for stage, batch in zip(self.stages, batches, strict=True):
            sizing = stage.arena.sizing
            for first, last in [(0, total)] if split is None else [(0, split), (split, total)]:
                part = batch if split is None else stage.part(batch, first, last, last - first + 3)
                for layer in range(sizing.lo, sizing.hi):
                    made = [rows_of(t, first, last, part, total) for t in inputs[layer]]
                    found = self.call(layer, Bound(stage.layers, part), made)[: last - first]
                    assert not found.isnan().any()
                    worst = max(worst, float((found - expected[layer][first:last]).abs().max()))
                stage.advance(part)
            stage.check()
        for sequence, count in counts.items():
            self.lengths[sequence] += count
        return worst

    def inputs(self, layer, num_rows):
        own = self.model.layers[layer]

        def noise(*shape):
            return torch.randn(shape, generator=self.generator)

        match own.kind:
            case LayerKind.SHORT_CONV:
                return (noise(num_rows, own.conv_channels),)
            case LayerKind.RECURRENT:
                size = 16
                heads = own.state_elements // size**2
                key = torch.nn.functional.normalize(noise(num_rows, heads, size), dim=-1)
                gate = -noise(num_rows, heads).abs()
                return (
                    noise(num_rows, heads, size),
                    key,
                    noise(num_rows, heads, size),
                    gate,
                    torch.sigmoid(gate),
                )
            case LayerKind.LATENT:
                key = noise(num_rows, 1, own.key_row[1])
                return noise(num_rows, 3, own.key_row[1]), key, key[..., : own.latent_size]
            case LayerKind.SHARED:
                source = self.model.layers[own.source_layer]
                return noise(num_rows, 2 * source.kv_heads, source.key_head_size), None, None
        heads = own.kv_heads
        return (
            noise(num_rows, 2 * heads, own.key_head_size),
            noise(num_rows, heads, own.key_head_size),
            noise(num_rows, heads, own.value_head_size),
        )

    def call(self, layer, cache, inputs):
        match self.model.layers[layer].kind:
            case LayerKind.SHORT_CONV:
                return cache.convolve(layer, *inputs, self.taps[layer], None, silu=layer % 2 == 0)
            case LayerKind.RECURRENT:
                return cache.scan(layer, *inputs)
        return cache.attend(layer, *inputs, 0.3)


def rows_of(tensor, first, last, part, total):
    """Rows [first, last) with ones behind them up to the part's; None as it is."""
    if tensor is None:
        return None
    assert len(tensor) == total
    behind = tensor.new_ones(len(part.positions) - (last - first), *tensor.shape[1:])
    return torch.cat([tensor[first:last], behind])


class Bound:
    def __init__(self, layers, batch):
        self.layers, self.batch = layers, batch

    def attend(self, layer, *inputs):
        return self.layers.attend(layer, self.batch, *inputs, fixed=False)

    def convolve(self, layer, *inputs, silu):
        return self.layers.convolve(layer, self.batch, *inputs, silu=silu)

    def scan(self, layer, *inputs):
        return self.layers.scan(layer, self.batch, *inputs, fixed=False)


HYBRID = model_of(
    sliding_layer(2, 32, 24),
    full_layer(1, 64),
    recurrent_layer(key_groups=2, value_heads=2, state_size=16),
    sliding_layer(1, 64, 9),
    shared_layer(1),
    shared_layer(3),
    latent_layer(32, 16),
    conv_layer(24, 3),
)


WINDOWED = model_of(
    sliding_layer(2, 32, 24),
    full_layer(1, 64),
    sliding_layer(1, 64, 9),
    shared_layer(1),
    shared_layer(2),
    latent_layer(32, 32),
)
WINDOWS_ONLY = model_of(sliding_layer(2, 32, 24), sliding_layer(2, 64, 40))
STATES_ONLY = model_of(
    conv_layer(24, 3), recurrent_layer(key_groups=1, value_heads=2, state_size=16)
)


def options_of(ring=True, block=4, slack=8):
    return CacheOptions(block_tokens=block, prefill_chunk=32, rewind_slack=slack, ring=ring)


def walk(walker, source, num_steps, bound=2e-5):
    """Random prefill, decode, rewind and free; (rewinds granted, refused)."""
    rewound = refused = 0
    for _ in range(num_steps):
        if len(walker.lengths) < 4 or (len(walker.lengths) < 6 and source.random() < 0.2):
            walker.open()
        elif source.random() < 0.15:
            walker.close(source.choice(sorted(walker.lengths)))
            continue
        chosen = source.sample(sorted(walker.lengths), source.randint(1, len(walker.lengths)))
        counts = {s: source.choice((1, 1, 3, 17, 32)) for s in chosen}
        counts = {s: n for s, n in counts.items() if walker.lengths[s] + n <= LONGEST}
        if not counts:
            walker.close(chosen[0])
            continue
        total = sum(counts.values())
        split = source.randint(1, total - 1) if total > 1 and source.random() < 0.4 else None
        assert walker.step(counts, split) <= bound
        victim = source.choice(sorted(walker.lengths))
        granted = walker.rewind(
            victim, max(walker.lengths[victim] - source.choice((1, 5, 8, 90)), 0)
        )
        rewound, refused = rewound + granted, refused + (not granted)
    for sequence in sorted(walker.lengths):
        walker.close(sequence)
    for stage in walker.stages:
        assert stage.used_bytes() == (0, 0, 0)
        stage.check()
    return rewound, refused


@pytest.mark.slow
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("cuts", [(0, 8), (0, 1, 7, 8)])
def test_every_kind_of_layer_equals_the_oracle_through_a_random_walk(cuts, ring):
    assert walk(Walker(HYBRID, cuts, options_of(ring)), random.Random(1), 25)[1]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("block", [1, 16, 24])
def test_attention_layers_go_back_where_the_window_is_whole_and_equal_the_oracle_after(
    block, in_place
):
    walker = Walker(WINDOWED, (0, 6), options_of(block=block), attention=kernel(in_place))
    rewound, refused = walk(walker, random.Random(2), 30)
    assert rewound
    assert refused
    assert all((stage.layers.rows_unpacked == 0) is in_place for stage in walker.stages)


def kernel(in_place):
    if not in_place:
        return None
    if host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    return host_attention.loaded()


@pytest.mark.slow
@pytest.mark.parametrize("model", [WINDOWS_ONLY, STATES_ONLY], ids=["windows", "states"])
def test_a_stage_without_full_layers_equals_the_oracle(model):
    walker = Walker(model, (0, 1, 2), options_of())
    walk(walker, random.Random(3), 25)
    assert all(stage.arena.units.full_records == 0 for stage in walker.stages)


@pytest.mark.slow
def test_states_of_a_cuda_stage_equal_the_oracle_by_emulation(tmp_path):
    kernels = {SCAN: [scan_kernel(torch.float32, 16), conv_kernel(torch.float32)]}
    with cuda_ops.serving("cpu", CudaKernels(EmulatedLauncher(tmp_path, kernels))):
        walker = Walker(STATES_ONLY, (0, 2), options_of())
        (stage,) = walker.stages
        assert isinstance(stage.layers.recurrent, CudaKernelRecurrent)
        first, second = walker.open(), walker.open()
        for counts, split in (({first: 17}, None), ({first: 3, second: 9}, 5), ({second: 1}, None)):
            assert walker.step(counts, split) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_formats_and_head_sizes_may_differ_by_layer(in_place):
    model = model_of(
        full_layer(1, 64), sliding_layer(2, 32, 24), sliding_layer(1, 64, 9), full_layer(2, 32)
    )
    pairs = tuple(
        parse_pair(name) for name in ("q8_0:q5_1", "q4_0:f16", "turbo4:turbo3", "bf16:q8_0")
    )
    walker = Walker(model, (0, 2, 4), options_of(), pairs, attention=kernel(in_place))
    walk(walker, random.Random(4), 20, bound=1e-4)


@pytest.mark.slow
def test_latent_rows_of_a_real_size_are_attended_in_place():
    walker = Walker(model_of(latent_layer(512, 64)), (0, 1), options_of(), attention=kernel(True))
    sequence = walker.open()
    for count in (32, 1, 5):
        assert walker.step({sequence: count}) <= 1e-4
    assert walker.stages[0].layers.rows_unpacked == 0


def test_a_ring_keeps_its_records_while_a_full_layer_grows():
    walker = Walker(model_of(sliding_layer(1, 32, 24), full_layer(1, 32)), (0, 2), options_of())
    sequence, used = walker.open(), []
    for _ in range(8):
        walker.step({sequence: 32})
        used.append(walker.stages[0].used_bytes())
    ring = walker.stages[0].arena.sizing.ring_rows
    assert ring == 24 + 32 + 8 + 31 + 1
    assert [u.window for u in used[3:]] == [used[2].window] * 5
    assert used[2].window == ring // 4 * walker.stages[0].arena.sizing.window_record_bytes
    assert all(b.full > a.full for a, b in itertools.pairwise(used))


def test_a_step_lists_the_records_of_its_window_alone():
    walker = Walker(model_of(sliding_layer(1, 32, 24)), (0, 1), options_of())
    (stage,) = walker.stages
    sequence = walker.open()
    for start in range(0, 1248, 32):
        stage.extend([Rows(sequence, start, 32, False)])
    batch = stage.extend([Rows(sequence, 1248, 32, False)])
    assert batch.window is not None
    (segment,) = batch.window.segments
    assert (segment.length, segment.base) == (1280, 1024)
    assert len(segment.records) == (1280 - 1024) // 4


def test_a_pool_that_is_short_leaves_the_others_as_they_were():
    model = model_of(sliding_layer(1, 32, 24), full_layer(1, 32), conv_layer(8, 3))
    (sizing,) = size_fence(model, (parse_pair("f32"),) * 3, explicit((0, 3), 3), options_of())
    for short, error, units in (
        ("window records", OutOfRecords, (9, 1, 2)),
        ("state slots", OutOfSlots, (9, 9, 1)),
    ):
        stage = StageCache(TorchDevice(), model, sizing, Footprint(*units), max_sequences=1)
        stage.open(0)
        with pytest.raises(error, match=short):
            stage.extend([Rows(0, 0, 8, False)])
        assert stage.used_bytes() == (0, 0, 0)
        stage.check()


def test_records_of_a_sequence_follow_it_back():
    walker = Walker(model_of(full_layer(1, 32)), (0, 1), options_of())
    (stage,) = walker.stages
    sequence = walker.open()
    walker.step({sequence: 14})
    before = stage.records(sequence).tolist()
    assert walker.rewind(sequence, 6)
    assert stage.records(sequence).tolist() == before[:2]


def test_rows_that_would_overrun_the_window_are_refused_and_nothing_is_taken():
    walker = Walker(WINDOWED, (0, 6), options_of())
    sequence = walker.open()
    walker.step({sequence: 32})
    (stage,) = walker.stages
    used = stage.used_bytes()
    with pytest.raises(InternalError, match=r"rows \[32, 132\) would overwrite the window of 24"):
        stage.extend([Rows(sequence, 32, 100, False)])
    assert (stage.used_bytes(), stage.length(sequence)) == (used, 32)
    stage.check()
    assert walker.step({sequence: 32}) <= 2e-5


def test_a_step_back_that_is_refused_changes_nothing_and_says_what_is_resident():
    walker = Walker(WINDOWED, (0, 6), options_of())
    sequence = walker.open()
    for _ in range(5):
        walker.step({sequence: 32})
    (stage,) = walker.stages
    used = stage.used_bytes()
    for length in (0, 60, 161, -1):
        assert not stage.can_rewind_to(sequence, length)
        with pytest.raises(NotResident, match=r"cannot go back to.*rows from 64 on are resident"):
            stage.rewind(sequence, length)
    assert (stage.used_bytes(), stage.length(sequence)) == (used, 160)
    assert stage.can_rewind_to(sequence, 152)
    stage.rewind(sequence, 152)
    stage.check()
    states = Walker(STATES_ONLY, (0, 2), options_of())
    sequence = states.open()
    states.step({sequence: 3})
    with pytest.raises(NotResident, match="recurrent layers do not go back"):
        states.stages[0].rewind(sequence, 2)


def test_idle_rows_pass_through_every_layer_and_leave_the_arena_as_it_was():
    walker = Walker(HYBRID, (0, 8), options_of())
    (stage,) = walker.stages
    batch = stage.idle(5)
    for layer in range(8):
        found = walker.call(layer, Bound(stage.layers, batch), walker.inputs(layer, 5))
        assert len(found) == 5
    stage.advance(batch)
    stage.check()
    assert (stage.arena.storage == POISON).all()


def test_states_swap_and_are_never_copied_and_start_from_zero():
    walker = Walker(STATES_ONLY, (0, 2), options_of())
    (stage,) = walker.stages
    sequence = walker.open()
    read = []
    for _ in range(4):
        batch = stage.extend([Rows(sequence, walker.lengths[sequence], 1, False)])
        (span,) = batch.states.spans.entries
        read.append(span[2:])
        stage.advance(batch)
        walker.lengths[sequence] += 1
    (a, b), *_ = read
    assert read == [[a, b], [b, a], [a, b], [b, a]]
    assert a != b
    walker.close(sequence)
    again = walker.open()
    assert walker.step({again: 2}) <= 2e-5


def test_a_flat_layout_serves_rings_that_are_never_lapped_and_refuses_the_others():
    model = model_of(sliding_layer(1, 32, 24), full_layer(1, 32))
    for rows, fits in ((90, True), (400, False)):
        options = CacheOptions(
            layout=Layout.FLAT, flat_rows=rows, prefill_chunk=32, rewind_slack=8, block_tokens=4
        )
        (sizing,) = size_fence(model, (parse_pair("f32"),) * 2, explicit((0, 2), 2), options)
        units = Footprint(1, 1, 0)
        if fits:
            stage = StageCache(TorchDevice(), model, sizing, units, max_sequences=1)
            stage.open(0)
            stage.extend([Rows(0, 0, 90, False)])
            stage.check()
            continue
        with pytest.raises(ConfigError, match=r"--layout flat: a ring of 95 rows.*context of 400"):
            StageCache(TorchDevice(), model, sizing, units, max_sequences=1)


def made_layer(source, owners):
    size, heads = source.choice((32, 64)), source.randint(1, 3)
    match source.choice(list(LayerKind)):
        case LayerKind.SLIDING:
            return sliding_layer(heads, size, source.randint(1, 40))
        case LayerKind.LATENT:
            return latent_layer(size, 32)
        case LayerKind.RECURRENT:
            return recurrent_layer(key_groups=1, value_heads=heads, state_size=16)
        case LayerKind.SHORT_CONV:
            return conv_layer(8 * heads, source.randint(2, 4))
        case LayerKind.SHARED if owners:
            return shared_layer(source.choice(owners))
    return full_layer(heads, size)


def made_model(source):
    """A random model: kinds, heads, head sizes, windows, sources that are shared, formats, a fence."""
    layers, owners = [], []
    for index in range(source.randint(1, 7)):
        layers.append(made_layer(source, owners))
        if layers[-1].kind in (LayerKind.FULL, LayerKind.SLIDING):
            owners.append(index)
    model = model_of(*layers)
    names = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "nvfp4")
    pairs = tuple(parse_pair(f"{source.choice(names)}:{source.choice(names)}") for _ in layers)
    edges = model.shared_edges()
    cuts = [
        cut
        for cut in range(1, len(layers))
        if source.random() < 0.4 and not any(a < cut <= b for a, b in edges)
    ]
    return model, pairs, (0, *cuts, len(layers))


def walk_a_made_model(seed):
    source = random.Random(seed)
    model, pairs, cuts = made_model(source)
    options = CacheOptions(
        block_tokens=source.choice((1, 4, 16, 24)),
        prefill_chunk=32,
        rewind_slack=source.choice((0, 8, 64)),
        ring=source.random() < 0.8,
    )
    kernels = kernel(in_place=source.random() < 0.5)
    walk(Walker(model, cuts, options, pairs, kernels, seed=seed), source, 12, bound=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_made_models_are_sized_as_allocated_and_equal_the_oracle(seed):
    walk_a_made_model(seed)


@pytest.mark.full
def test_many_made_models_are_sized_as_allocated_and_equal_the_oracle():
    for seed in range(12, 400):
        walk_a_made_model(seed)


CODEWORDS = 8


@pytest.mark.slow
def test_a_freed_sequence_never_shows_in_the_next():
    """Eight sequences live and die interleaved; each layer's rows all carry their sequence's number.

    A row of another sequence, or of the one before in the same records, ring or slot, would show as
    a mean of two numbers.
    """
    model = model_of(
        sliding_layer(1, 32, 9),
        full_layer(1, 32),
        conv_layer(8, 3),
        recurrent_layer(key_groups=1, value_heads=1, state_size=16),
    )
    options = options_of(block=4)
    (sizing,) = size_fence(model, (parse_pair("f32"),) * 4, explicit((0, 4), 4), options)
    units = sizing.footprint(120).times(CODEWORDS)
    stage = StageCache(TorchDevice(), model, sizing, units, max_sequences=CODEWORDS)
    stage.arena.storage.fill_(POISON)
    source, word, live = random.Random(5), 0, {}
    for _ in range(150):
        while len(live) < CODEWORDS:
            word += 1
            stage.open(word)
            live[word] = 0
        chosen = source.sample(sorted(live), source.randint(1, CODEWORDS))
        counts = {s: source.choice((1, 2, 32)) for s in chosen}
        batch = stage.extend([Rows(s, live[s], n, False) for s, n in counts.items()])
        words = torch.cat([torch.full((n,), float(s)) for s, n in counts.items()])
        rows = words[:, None, None].expand(-1, 1, 32).contiguous()
        for layer in (0, 1):
            out = stage.layers.attend(
                layer, batch, torch.ones_like(rows), rows, rows, 0.01, fixed=False
            )
            assert torch.allclose(out, rows, rtol=1e-5)
        conv = stage.layers.convolve(
            2, batch, words[:, None].expand(-1, 8).contiguous(), torch.ones(8, 3), None, silu=False
        )
        ones = torch.ones(len(words), 1, 16) / 4
        gate, beta = torch.zeros(len(words), 1), torch.full((len(words), 1), 0.5)
        scan = stage.layers.scan(
            3, batch, ones, ones, rows[..., :16].contiguous(), gate, beta, fixed=False
        )
        at = 0
        for s, n in counts.items():
            seen = torch.arange(live[s], live[s] + n) + 1.0
            assert torch.allclose(conv[at : at + n, 0], s * seen.clamp(max=3))
            assert torch.allclose(scan[at : at + n, 0, 0], s * (1 - 0.5**seen), rtol=1e-4)
            at, live[s] = at + n, live[s] + n
        stage.advance(batch)
        for s in sorted(live):
            if live[s] > 80 or source.random() < 0.1:
                stage.close(s)
                del live[s]
        stage.check()
    assert word > 3 * CODEWORDS
