"""A scan or a convolution that lost one barrier, one shuffle or one mask is wrong by emulation.

Masks that only keep a lane from reading beyond a tensor are not here: what they keep away is not
used. See ``test_cuda_mutants`` for how mutants are made.
"""

import re

import pytest
import torch

from memkv_pp.cache import cuda_recurrent
from memkv_pp.cache.cuda_recurrent import SCAN, CudaRecurrent, conv_kernel, scan_kernel
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.cache.recurrent_ops import conv_states, matrix_states, short_conv, span_table
from memkv_pp.testing.emulated import EmulatedLauncher, KernelFault
from memkv_pp.testing.recurrent_rows import delta_rows, exact_scan, state_slots

pytestmark = pytest.mark.slow

F32 = torch.float32
KERNELS = [scan_kernel(F32, 20), conv_kernel(F32)]
# What is taken away, and what stays: each place is a mutant.
EDITS = {
    "barrier": (r"__syncthreads\(\);", ""),
    "shuffle": (r"__shfl_xor_sync\(0xFFFFFFFFu, (\S+), \w+\)", r"\1"),
    "second buffer": (r" \+ t % 2 \* 2 \* size", ""),
    "end of a key": (r"if \(i >= key_size\) continue;", ""),
    "rows of a state": (r" \|\| row >= key_size", ""),
    "columns of a state": (r"(span\.written < 0) \|\| !has_column", r"\1"),
    "columns of the outputs": (r" && has_column", ""),
    "zeros to read": (r"span\.read < 0 (?:\|\| |\? 0\.0f : )", ""),
    "nowhere to write": (r"span\.written < 0 \|\| | \|\| span\.written < 0", ""),
    "channels": (r"if \(channel >= channels\) return;", ""),
    "first rows roll": (r"begin > 0 \|\| ", ""),
}
NUM_MUTANTS = 15
# Outputs of the last rows and slots around the inner ones take what a mutant writes too far.
SPANS = [(2, 5, 3, 3), (0, 2, 0, 1), (7, 1, 4, 4), (8, 1, -1, 5), (9, 2, 0, -1)]
NUM_ROWS, INNER = 13, slice(2, 8)


def body():
    """The text of the kernels, without the headers in front of it."""
    text = kernel_source(SCAN)
    return text[text.rindex(f'"cuda/{SCAN}.cu"\n') + len(f'"cuda/{SCAN}.cu"\n') :]


def mutants():
    """(what was taken away, text) of each mutant."""
    text = body()
    return [
        (what, text[: found.start()] + found.expand(kept) + text[found.end() :])
        for what, (pattern, kept) in EDITS.items()
        for found in re.finditer(pattern, text)
    ]


def with_mutants(text):
    spaces = (f"namespace mutant_{i} {{\n{b}\n}}\n" for i, (_, b) in enumerate(mutants()))
    return text + "".join(spaces)


class MutantLauncher:
    """Launches the kernels of one mutant, or with an empty prefix the whole ones."""

    def __init__(self, launcher, prefix):
        self._launcher, self._prefix = launcher, prefix

    def launch(self, source, kernel, grid, threads, shared_bytes, arguments):
        kernel = self._prefix + kernel
        self._launcher.launch(source, kernel, grid, threads, shared_bytes, arguments)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    prefixes = ["", *(f"mutant_{i}::" for i in range(NUM_MUTANTS))]
    kernels = {SCAN: [prefix + kernel for prefix in prefixes for kernel in KERNELS]}
    return EmulatedLauncher(tmp_path_factory.mktemp("mutants"), kernels, edit=with_mutants)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def scan_is_right(kernels):
    offset, elements = 64, 2 * 20 * 40
    slots = state_slots(10, offset + 4 * elements + 64)
    states = matrix_states(slots[INNER], offset, 2, 20, 40)
    states[[0, 3, 4]] = normal(3, 2, 20, 40)
    rows, before, table = delta_rows(NUM_ROWS, 1, 2, 20, 40), slots.clone(), span_table(SPANS)
    exact, exact_states = exact_scan(states, table, rows)
    out = kernels.scan_delta(states, table.spans, *rows.arguments())
    sums = torch.allclose(out.double(), exact, rtol=0, atol=1e-5)
    new = torch.allclose(states.double(), exact_states, rtol=0, atol=1e-5, equal_nan=True)
    # Slots that no span writes, and what lies around the states of the others.
    for slot in (1, 3, 4, 5):
        begin = offset, offset + 4 * elements
        before[2 + slot, slice(*begin)] = slots[2 + slot, slice(*begin)]
    return sums and new and torch.equal(slots, before)


def convolution_is_right(kernels):
    channels, taps = 130, 3
    slots = state_slots(10, 64 + 4 * channels * taps + 64)
    conv_states(slots[INNER], 64, channels, taps)[[0, 3, 4]] = normal(3, channels, taps)
    theirs, table = slots.clone(), span_table(SPANS)
    values, weight = normal(NUM_ROWS, channels), normal(2 * channels, taps + 1)[:channels]
    wanted = short_conv(conv_states(theirs[INNER], 64, channels, taps), table, values, weight)
    states = conv_states(slots[INNER], 64, channels, taps)
    out = kernels.short_conv(states, table.spans, values, weight, max_rows=5)
    return torch.equal(out, wanted) and torch.equal(slots, theirs)


def right_in_every_order(launcher, prefix):
    kernels = CudaRecurrent(MutantLauncher(launcher, prefix))
    for seed in (0, 1):
        launcher.seed = seed
        try:
            if not scan_is_right(kernels) or not convolution_is_right(kernels):
                return False
        except KernelFault:
            return False
    return True


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(cuda_recurrent, "_CONV_ROWS", 4)


def test_whole_kernels_are_right_in_every_order(launcher):
    assert len(mutants()) == NUM_MUTANTS
    assert {what for what, _ in mutants()} == set(EDITS)
    assert right_in_every_order(launcher, "")


@pytest.mark.parametrize("index", range(NUM_MUTANTS))
def test_a_kernel_that_lost_a_barrier_a_shuffle_or_a_mask_is_wrong(index, launcher):
    assert not right_in_every_order(launcher, f"mutant_{index}::"), mutants()[index][0]
