"""The torch reference of attention with window, soft-cap and sinks, against a naive f64 softmax."""

import pytest
import torch

from memkv_pp.cache import ops

HEADS, GROUP, KEY_SIZE, VALUE_SIZE = 2, 3, 16, 24
SCALE = KEY_SIZE**-0.5
SINKS = torch.tensor([-30.0, 0.0, 1.5, 3.0, 60.0, -1.0])
OPTIONS = [
    {},
    {"window": 1},
    {"window": 40},
    {"window": 140},
    {"cap": 0.5},
    {"sinks_Q": SINKS},
    {"window": 7, "cap": 2.0, "sinks_Q": SINKS},
]


def rows(num_rows, length):
    generator = torch.Generator().manual_seed(length)
    return (
        torch.randn(num_rows, HEADS * GROUP, KEY_SIZE, generator=generator),
        torch.randn(HEADS, length, KEY_SIZE, generator=generator),
        torch.randn(HEADS, length, VALUE_SIZE, generator=generator),
    )


def naive(query, key, value, *, window=0, cap=0.0, sinks_Q=None):
    out = torch.zeros(len(query), HEADS * GROUP, VALUE_SIZE, dtype=torch.float64)
    for t in range(len(query)):
        end = key.shape[1] - len(query) + t + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head in range(HEADS * GROUP):
            at = head // GROUP
            scores = key[at, seen].double() @ query[t, head].double() * SCALE
            if cap:
                scores = cap * torch.tanh(scores / cap)
            sink = scores[:0] if sinks_Q is None else sinks_Q[head, None].double()
            weights = torch.softmax(torch.cat([scores, sink]), 0)[: len(scores)]
            out[t, head] = weights @ value[at, seen].double()
    return out


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("attend", [ops.attend, ops.attend_fixed])
@pytest.mark.parametrize(("num_rows", "length"), [(1, 1), (1, 150), (5, 5), (16, 300)])
def test_window_cap_and_sinks_are_applied(attend, options, num_rows, length):
    given = rows(num_rows, length)
    found = attend(*given, SCALE, **options)
    assert found.dtype is torch.float32
    assert (found - naive(*given, **options)).abs().max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_a_fixed_row_has_the_same_bits_in_any_company(options):
    query, key, value = rows(16, 300)
    together = ops.attend_fixed(query, key, value, SCALE, **options)
    for row in (0, 7, 15):
        seen = slice(0, 300 - 15 + row)
        alone = query[row : row + 1], key[:, seen], value[:, seen]
        assert torch.equal(ops.attend_fixed(*alone, SCALE, **options)[0], together[row])


@pytest.mark.parametrize("attend", [ops.attend, ops.attend_fixed])
def test_half_precision_comes_back_as_it_went_in(attend):
    query, key, value = (x.bfloat16() for x in rows(3, 20))
    found = attend(query, key, value, SCALE, sinks_Q=SINKS, cap=1.0)
    assert found.dtype is torch.bfloat16
    expected = naive(query, key, value, sinks_Q=SINKS, cap=1.0)
    assert (found.double() - expected).abs().max() < 2e-2
