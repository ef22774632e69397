"""The rotation: numpy's signs, Hadamard's matrix, and what a rotation must preserve."""

from itertools import islice

import numpy as np
import pytest
import torch

from memkv_pp.cache.rotation import rotate as rotate_tensor
from memkv_pp.errors import FormatError
from memkv_pp.formats import ROTATED_SIZES
from memkv_pp.rotation import random_bits, rotate, rotation_norm, sign_tables


def rows_of(size, num_rows=3):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(num_rows, size, generator=generator)


@pytest.mark.parametrize("seed", [42, 0, 1, 2**31, 2**32 - 1])
def test_random_bits_are_the_draws_of_numpy(seed):
    for count in (1, 2, 3, 1024):
        drawn = np.random.default_rng(seed).integers(0, 2, size=count)
        assert list(islice(random_bits(seed), count)) == drawn.tolist()


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_sign_tables_are_the_first_draws_and_the_next(size):
    drawn = np.random.default_rng(42).integers(0, 2, size=2 * size) * 2 - 1
    before, after = sign_tables(size)
    assert (before, after) == (tuple(drawn[:size]), tuple(drawn[size:]))
    assert abs(sum(before)) < size / 4
    assert abs(sum(after)) < size / 4


def test_the_first_signs_of_128_are_these():
    before, after = sign_tables(128)
    assert "".join("-+"[s > 0] for s in before[:16]) == "-++--+-+--++++++"
    assert before[64:] == sign_tables(64)[1]
    assert after == sign_tables(256)[0][128:]


@pytest.mark.parametrize("size", [0, 1, 32, 80, 96, 1024])
def test_another_size_is_refused_with_the_sizes_there_are(size):
    with pytest.raises(FormatError, match=rf"a head of {size} elements .*64, 128, 256, 512"):
        rotate([1.0] * size)
    with pytest.raises(FormatError, match=f"a head of {size} elements"):
        rotate_tensor(torch.zeros(2, size))


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_the_transform_is_the_hadamard_matrix_in_natural_order_between_the_signs(size):
    before, after = sign_tables(size)
    norm = rotation_norm(size)
    for column in (0, 1, 5, size // 2, size - 1):
        unit = [float(i == column) for i in range(size)]
        expected = [
            after[row] * (-1) ** (row & column).bit_count() * before[column] * norm
            for row in range(size)
        ]
        assert rotate(unit) == expected


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_rotating_back_restores_rows_and_norms_and_inner_products_stay(size):
    rows = rows_of(size)
    turned = rotate_tensor(rows)
    assert (turned - rows).abs().max() > 1
    torch.testing.assert_close(rotate_tensor(turned, inverse=True), rows, rtol=0, atol=2e-6)
    torch.testing.assert_close(turned.norm(dim=-1), rows.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(turned @ turned.T, rows @ rows.T, rtol=0, atol=2e-6 * size)
    # Random signs on both sides: turning twice is not turning back.
    assert (rotate_tensor(turned) - rows).abs().max() > 1


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_tensors_are_rotated_bit_for_bit_as_the_truth_rotates_a_row(size, inverse):
    rows = torch.cat([rows_of(size), rows_of(size) * 1e-40, torch.zeros(1, size)])
    found = rotate_tensor(rows, inverse=inverse)
    expected = torch.tensor([rotate(row, inverse=inverse) for row in rows.tolist()])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_rows_of_any_layout_and_dtype_are_rotated_alike_and_stay_as_they_were():
    rows = rows_of(64, 12).view(3, 4, 64)
    before = rows.clone()
    turned = rotate_tensor(rows)
    assert torch.equal(rows, before)
    assert torch.equal(rotate_tensor(rows.transpose(0, 1)), turned.transpose(0, 1))
    halves = rows.to(torch.bfloat16)
    assert torch.equal(rotate_tensor(halves), rotate_tensor(halves.float()))
    assert rotate_tensor(rows[:0]).shape == (0, 4, 64)


def test_one_outlier_spreads_evenly_over_the_head():
    turned = rotate_tensor(torch.eye(128)[5:6] * 100)
    assert set((turned.abs() * 128**0.5).round(decimals=3).flatten().tolist()) == {100.0}
