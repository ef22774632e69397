"""The seven operations of a device, on the CPU."""

import pytest
import torch

from memkv_pp.cache.device import TorchDevice
from memkv_pp.errors import ConfigError, InternalError


def test_new_tensors_have_one_dimension_and_the_dtype_asked_for():
    device = TorchDevice("cpu")
    zeros = device.zeros(5, torch.float32)
    assert (zeros.shape, zeros.dtype, zeros.tolist()) == ((5,), torch.float32, [0.0] * 5)
    assert (device.uninit(4, torch.bfloat16).shape, device.bytes(3).dtype) == ((4,), torch.uint8)
    assert device.bytes(0).untyped_storage().nbytes() == 0
    assert device.torch_device == torch.device("cpu")


def test_numbers_travel_as_int32():
    sent = TorchDevice("cpu").to_device_i32([3, -1, 2**31 - 1])
    assert (sent.dtype, sent.tolist()) == (torch.int32, [3, -1, 2**31 - 1])
    assert TorchDevice("cpu").to_device_i32([]).shape == (0,)


def test_a_clone_and_its_source_do_not_share_bytes():
    device = TorchDevice("cpu")
    source = torch.arange(4)
    copy = device.clone(source)
    source[0] = 9
    copy[1] = 8
    assert (source.tolist(), copy.tolist()) == ([9, 1, 2, 3], [0, 8, 2, 3])


def test_a_copy_lands_at_its_offset_and_touches_nothing_else():
    target = torch.zeros(6, dtype=torch.uint8)
    TorchDevice("cpu").copy_into(target, 2, torch.tensor([7, 8, 9], dtype=torch.uint8), 2)
    assert target.tolist() == [0, 0, 7, 8, 0, 0]


@pytest.mark.parametrize(
    ("offset", "count"),
    [
        pytest.param(-1, 1, id="before the target"),
        pytest.param(5, 2, id="past the target"),
        pytest.param(0, 5, id="past the source"),
        pytest.param(2, -1, id="a negative count"),
    ],
)
def test_a_copy_that_leaves_a_tensor_is_refused_and_copies_nothing(offset, count):
    target = torch.zeros(6, dtype=torch.uint8)
    with pytest.raises(InternalError, match=f"copy of {count} elements"):
        TorchDevice("cpu").copy_into(target, offset, torch.ones(4, dtype=torch.uint8), count)
    assert target.tolist() == [0] * 6


def test_an_int_is_set_in_place():
    device = TorchDevice("cpu")
    lengths = device.zeros(3, torch.int32)
    address = lengths.data_ptr()
    device.set_i32(lengths, 1, 42)
    assert (lengths.tolist(), lengths.data_ptr()) == ([0, 42, 0], address)


@pytest.mark.parametrize("name", ["gpu0", "cpu:x", ""])
def test_an_unknown_device_is_refused_by_its_knob(name):
    with pytest.raises(ConfigError, match="--devices: "):
        TorchDevice(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused_by_its_knob():
    with pytest.raises(ConfigError, match="--devices: 'cuda:0' was asked for"):
        TorchDevice("cuda:0")
