"""A kernel that lost one barrier, one shuffle or one mask gives wrong results by emulation.

Each source is compiled once, with every mutant of its kernels in a namespace of its own behind it.
A mutant is caught when its result differs from the reference in ascending or in descending order of
threads, or when the emulation finds it at fault.
"""

import re

import pytest
import torch

from memkv_pp.cache.cuda_kernels import CudaKernels
from memkv_pp.cache.cuda_launch import (
    ATTEND,
    CODEC,
    COPY,
    ROTATE,
    append_kernel,
    attend_kernel,
    exponents_kernel,
    gather_kernel,
    merge_kernel,
    rotate_kernel,
)
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.formats import parse_format
from memkv_pp.rotation import rotate, sign_tables
from memkv_pp.testing.emulated import EmulatedLauncher, KernelFault
from memkv_pp.testing.packed_sides import (
    POISON,
    attention,
    fill,
    packed_layer,
    packed_sequences,
    put,
    rows_of,
)

pytestmark = pytest.mark.slow

F32 = torch.float32
TURBO4E, PLAIN = parse_format("turbo4e"), parse_format("f32")
KERNELS = {
    CODEC: [make(TURBO4E, F32) for make in (append_kernel, exponents_kernel, gather_kernel)],
    ATTEND: [attend_kernel(PLAIN, PLAIN, F32, 8), merge_kernel(F32)],
    COPY: ["copy_records", "copy_state"],
    ROTATE: [rotate_kernel(F32, 64)],
}
# What is taken away, and how often it is there: each place is a mutant.
EDITS = {
    "barrier": (r"__syncthreads\(\);", ""),
    "shuffle": (r"__shfl_xor_sync\(0xFFFFFFFFu, (\S+), \w+\)", r"\1"),
    "score mask": (r"first \+ lane < visible\(v\) && ", ""),
    "sum mask": (r"first \+ key < seen\[v\] && ", ""),
    "window of scores": (r" && first \+ lane >= hidden\(v\)", ""),
    "window of sums": (r" && first \+ key >= unseen\[v\]", ""),
    "cap": (r"if \(cap > 0\.0f\) score = [^;]+;", ""),
    "sink": (r"if \(sinks && !none\) [^;]+;", ""),
    "empty split": (r"if \(lse\[at\] != minus_infinity\(\)\)", ""),
    "exponent of no record": (r"records\[at\] < 0 \|\| ", ""),
    "exponent of a later row": (r" \|\| rows\[at\] != 0", ""),
    "exponent": (r"if \(exponents\) factor = [^;]+;", ""),
    "negative id": (r"if \((?:record|slot|into) < 0[^)]*\) (?:continue|return);", ""),
}
MUTANTS_OF = {CODEC: 10, ATTEND: 14, COPY: 2, ROTATE: 1}


def ids(values):
    return torch.tensor(values, dtype=torch.int64)


def body_of(source):
    """The text of a source's kernels and of headers that have warp operations: all but device.h."""
    text = kernel_source(source)
    return text[text.index("#line", text.rindex('"cuda/device.h"\n')) :]


def mutants_of(source):
    """(what was taken away, text) of each mutant."""
    body = body_of(source)
    return [
        (what, body[: found.start()] + found.expand(kept) + body[found.end() :])
        for what, (pattern, kept) in EDITS.items()
        for found in re.finditer(pattern, body)
    ]


def with_mutants(text):
    source = re.findall(r'"cuda/(\w+)\.cu"', text)[-1]
    bodies = [body for _, body in mutants_of(source)]
    return text + "".join(f"namespace mutant_{i} {{\n{b}\n}}\n" for i, b in enumerate(bodies))


class MutantLauncher:
    """Launches the kernels of one mutant, or with an empty prefix the whole ones."""

    def __init__(self, launcher, prefix):
        self._launcher, self._prefix = launcher, prefix

    def launch(self, source, kernel, grid, threads, shared_bytes, arguments):
        kernel = self._prefix + kernel
        self._launcher.launch(source, kernel, grid, threads, shared_bytes, arguments)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    kernels = {
        source: [
            prefix + kernel
            for prefix in ("", *(f"mutant_{i}::" for i in range(MUTANTS_OF[source])))
            for kernel in names
        ]
        for source, names in KERNELS.items()
    }
    return EmulatedLauncher(tmp_path_factory.mktemp("mutants"), kernels, edit=with_mutants)


@pytest.fixture(autouse=True)
def new_tensors_hold_nan():
    """What a kernel leaves unwritten shows; one thread as in the other tests of kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def codec_is_right(kernels):
    ours, theirs = (packed_layer("turbo4e", "f32", key_size=64) for _ in range(2))
    # Unlike the poison of shared memory, which may be written to where nothing should be.
    for layer in (ours, theirs):
        layer.arena.fill_(0x55)
    values = torch.randn(41, 2, 64, generator=torch.Generator().manual_seed(0))
    # Later rows are smaller, and the last one, which is written nowhere, would be a first row.
    values *= torch.logspace(3, 0, 41)[:, None, None]
    records = [i // 16 if i % 5 != 1 else -1 for i in range(40)] + [-1]
    rows = [i % 16 for i in range(40)] + [0]
    kernels.append(ours.key, values, ids(records), ids(rows))
    put(theirs.key, values, records, rows)
    fill(theirs.key, [3, 4], 32, seed=1)
    got = kernels.gather(theirs.key, ids([4, 3]), F32)
    fill(ours.key, [3, 4], 32, seed=1)
    return torch.equal(ours.arena, theirs.arena) and torch.equal(
        got, rows_of(theirs.key, [4, 3], 32)
    )


def attention_is_right(kernels):
    # Two blocks of query vectors, a split that one sequence does not reach, tiles that end early.
    layer = packed_layer("f32", "f32", heads=1, value_size=96, num_records=16)
    sequences = packed_sequences(layer, [100, 41], [2, 2])
    # The last row of the second sequence is hidden from the row before it.
    layer.value.codes[sequences.tables[1][-1], :, 40 % 16] = POISON
    if not attends(kernels, layer, sequences):
        return False
    # A window of 40 hides row 50 of the first sequence, in the middle of a tile.
    layer.value.codes[sequences.tables[0][50 // 16], :, 50 % 16] = POISON
    sinks = torch.tensor([0.0, 1.0, 2.0, -1.0, 4.0])
    return attends(kernels, layer, sequences, window=40, cap=0.5, sinks_Q=sinks)


def attends(kernels, layer, sequences, **knobs):
    query = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1))
    out, lse = kernels.attend(
        query, layer.key, layer.value, sequences.records, sequences.segments,
        max_rows=2, max_length=100, scale=0.125, split_rows=48, **knobs,
    )  # fmt: skip
    expected, expected_lse = attention(query, layer, sequences, 0.125, **knobs)
    sums = torch.allclose(out.double(), expected, rtol=0, atol=1e-5, equal_nan=True)
    return sums and torch.allclose(lse.double(), expected_lse, rtol=0, atol=1e-4)


def copies_are_right(kernels):
    # Units 1 to 4 of six, so that a negative id meets a neighbour.
    size, inner = 16 * 40, slice(16 * 40, 5 * 16 * 40)
    source = torch.arange(6 * size).to(torch.uint8).view(6, size)
    into, out_of = ids([3, 0, -1]), ids([0, 2, 1])
    expected = torch.zeros(6, size, dtype=torch.uint8)
    expected[[4, 1]] = source[[1, 3]]
    records, states = torch.zeros(6 * size, dtype=torch.uint8), torch.zeros_like(source).flatten()
    from_inner = source.flatten()[inner]
    kernels.copy_records(records[inner], from_inner, into, out_of, size)
    kernels.copy_state(
        states[inner], from_inner, into, out_of, slot_bytes=size, offset=0, num_elements=size // 4
    )
    return torch.equal(records, expected.flatten()) and torch.equal(states, expected.flatten())


def rotation_is_right(kernels):
    first, second = (torch.tensor(signs, dtype=F32) for signs in sign_tables(64))
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([rotate(row) for row in values.tolist()])
    return torch.equal(kernels.rotate(values, first, second), truth)


IS_RIGHT = {
    CODEC: codec_is_right,
    ATTEND: attention_is_right,
    COPY: copies_are_right,
    ROTATE: rotation_is_right,
}


def right_in_every_order(launcher, source, prefix):
    for seed in (0, 1):
        launcher.seed = seed
        try:
            if not IS_RIGHT[source](CudaKernels(MutantLauncher(launcher, prefix))):
                return False
        except KernelFault:
            return False
    return True


@pytest.mark.parametrize("source", KERNELS)
def test_whole_kernels_are_right_in_every_order(source, launcher):
    assert len(mutants_of(source)) == MUTANTS_OF[source]
    assert right_in_every_order(launcher, source, "")


@pytest.mark.parametrize(
    ("source", "index"), [(source, i) for source, count in MUTANTS_OF.items() for i in range(count)]
)
def test_a_kernel_that_lost_a_barrier_a_shuffle_or_a_mask_is_wrong(source, index, launcher):
    lost = mutants_of(source)[index][0]
    assert not right_in_every_order(launcher, source, f"mutant_{index}::"), lost
