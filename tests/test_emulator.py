"""The block-and-thread emulation itself: barriers, shuffles, order, poison and faults."""

import numpy as np
import pytest
import torch

from memkv_pp.cache.cuda_launch import ROTATE
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.errors import InternalError
from memkv_pp.testing.emulated import EmulatedLauncher, KernelFault

pytestmark = pytest.mark.slow

KERNELS = """
// The sum of each warp, by way of shuffles that go down.
__global__ void sum_down(const int* in, int* out) {
  int value = in[threadIdx.x];
  for (int by = 16; by > 0; by /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, by);
  out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, value, 0);
}

// Neighbours swap 64-bit values within the low half of the warp; the rest takes no part.
__global__ void swap_half(const int64_t* in, int64_t* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, in[threadIdx.x], 1);
}

// Every lane reads lane 20, which is outside the mask.
__global__ void outside(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xFFFFu, 1.0f, 20);
}

// Each thread passes its number to the next one; the last of the block has left before.
__global__ void pass_on(int* out, int leave, int synchronise) {
  MEMKV_SHARED(int, shared);
  const int thread = (int)threadIdx.x, count = (int)blockDim.x - leave;
  if (thread >= count) return;
  shared[thread] = (int)blockIdx.x * 1000 + thread;
  if (synchronise == 1) __syncthreads();
  if (synchronise == 2) __syncwarp();
  out[blockIdx.x * blockDim.x + thread] = shared[(thread + 1) % count];
}

__global__ void first_word(uint32_t* out) {
  MEMKV_SHARED(uint32_t, shared);
  out[blockIdx.x] = shared[0];
  shared[0] = 0;
}

__global__ void places(int* out) {
  const int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  out[block * blockDim.x + threadIdx.x] = (int)(block * blockDim.x + threadIdx.x);
}

__global__ void half_a_warp_waits() {
  if (threadIdx.x < 16) __syncwarp();
  else __syncthreads();
}

__global__ void beyond_the_end(int words) {
  MEMKV_SHARED(uint32_t, shared);
  shared[words] = 1;
}
"""
NAMES = (
    *("sum_down", "swap_half", "outside", "pass_on", "first_word", "places"),
    *("half_a_warp_waits", "beyond_the_end"),
)
INT = torch.int32


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    text = kernel_source(ROTATE) + KERNELS
    return EmulatedLauncher(
        tmp_path_factory.mktemp("emulator"), {ROTATE: NAMES}, edit=lambda _: text
    )


@pytest.fixture
def run(launcher):
    def run(kernel, *arguments, grid=(1, 1, 1), threads=64, shared_bytes=0, seed=0):
        launcher.seed = seed
        launcher.launch(ROTATE, kernel, grid, threads, shared_bytes, arguments)

    return run


def numbers(count, dtype=INT):
    return torch.arange(count, dtype=dtype)


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_shuffles_exchange_values_across_the_lanes_of_a_warp(run, seed):
    out = torch.zeros(64, dtype=INT)
    run("sum_down", numbers(64), out, seed=seed)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_a_mask_of_half_a_warp_exchanges_among_its_lanes(run):
    out = torch.full((64,), -1)
    run("swap_half", numbers(64, torch.int64) << 40, out)
    wanted = [(i ^ 1) << 40 if i % 32 < 16 else -1 for i in range(64)]
    assert out.tolist() == wanted


def test_a_lane_outside_the_mask_gives_poison(run):
    out = torch.zeros(16)
    run("outside", out, threads=32)
    assert out.isnan().all()


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_barrier_waits_for_the_threads_that_have_not_left(run, seed):
    out = torch.full((2 * 100,), -1, dtype=INT)
    run(
        "pass_on", out, np.int32(7), np.int32(1),
        grid=(2, 1, 1), threads=100, shared_bytes=400, seed=seed,
    )  # fmt: skip
    block = [(i + 1) % 93 for i in range(93)]
    assert out.tolist() == block + [-1] * 7 + [1000 + i for i in block] + [-1] * 7


@pytest.mark.parametrize("seed", [0, 1])
def test_without_a_barrier_a_thread_reads_poison(run, seed):
    out = torch.zeros(64, dtype=INT)
    run("pass_on", out, np.int32(0), np.int32(0), shared_bytes=256, seed=seed)
    assert (out == -1).any()


def test_a_warp_barrier_orders_one_warp_only(run):
    out = torch.zeros(64, dtype=INT)
    run("pass_on", out, np.int32(0), np.int32(2), shared_bytes=256)
    # Thread 31 looks into the second warp, which has not begun.
    assert [i for i in range(64) if out[i] != (i + 1) % 64] == [31]


def test_shared_memory_is_poisoned_before_every_block(run):
    out = torch.zeros(3, dtype=INT)
    run("first_word", out, grid=(3, 1, 1), threads=1, shared_bytes=4)
    assert out.tolist() == [-1] * 3


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_every_block_of_a_grid_runs_once(run, seed):
    out = torch.zeros(2 * 3 * 4 * 5, dtype=INT)
    run("places", out, grid=(2, 3, 4), threads=5, seed=seed)
    assert torch.equal(out, numbers(120))


def test_a_warp_operation_that_not_all_lanes_reach_is_a_fault_and_the_next_launch_runs(run):
    with pytest.raises(KernelFault, match="thread 0 waits in block 0"):
        run("half_a_warp_waits", threads=32)
    out = torch.zeros(64, dtype=INT)
    run("sum_down", numbers(64), out)
    assert out[0] == sum(range(32))


def test_a_write_past_the_end_of_shared_memory_is_a_fault(run):
    run("beyond_the_end", np.int32(9), threads=1, shared_bytes=40)
    with pytest.raises(KernelFault, match="written beyond its end in block 0"):
        run("beyond_the_end", np.int32(10), threads=1, shared_bytes=40)


def test_a_kernel_that_was_not_built_is_refused(run):
    with pytest.raises(InternalError, match="not built for copy_records of rotate"):
        run("copy_records")


def test_a_source_that_does_not_compile_says_why(tmp_path):
    broken = EmulatedLauncher(tmp_path, {ROTATE: ["places"]}, edit=lambda text: text + "int x = ;")
    with pytest.raises(InternalError, match="rotate does not compile for emulation"):
        broken.launch(ROTATE, "places", (1, 1, 1), 1, 0, ())
