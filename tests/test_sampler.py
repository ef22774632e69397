"""Draws are a function of the request and the position alone, and follow the distribution."""

import math
import random

import pytest
import torch

from memkv_pp.stage.sampler import draw_token, uniform
from memkv_pp.wire import NO_TOKEN, Sampling

INF = math.inf
MASK = (1 << 64) - 1


def logits(*values):
    return torch.tensor(values, dtype=torch.float32)


def sampled(temperature=1.0, top_p=1.0, seed=0, prompt_index=0):
    return Sampling(temperature=temperature, top_p=top_p, seed=seed, prompt_index=prompt_index)


def philox(counter, key):
    """The first word of Philox-4x64 with ten rounds, from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & MASK, (left >> 64) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0


@pytest.mark.parametrize(
    ("seed", "prompt_index", "position", "draw", "word"),
    [
        (0, 0, 0, 0, 0x02F4BA6408E4D89B),
        (7, 0, 0, 0, 0xDF4034B829E9FBA4),
        (7, 1, 0, 0, 0xE1E9589FBF7F6F1D),
        (7, 0, 1, 0, 0x15352DA77ECEE8E6),
        (7, 0, 0, 1, 0xDF9A705D89512DB7),
        (-1, 3, 4096, 2, 0xB80ABEC0367FE09E),
    ],
)
def test_the_generator_is_philox_at_fixed_vectors(seed, prompt_index, position, draw, word):
    # The generator counts before it draws.
    assert philox((position + 1, draw, 0, 0), (seed & MASK, prompt_index & MASK)) == word
    found = uniform(sampled(seed=seed, prompt_index=prompt_index), position, draw)
    assert found == (word >> 11) / 2**53


def test_no_two_draws_of_a_grid_are_equal_and_their_order_is_free():
    places = [
        (seed, prompt, position, draw)
        for seed in (0, 1)
        for prompt in (0, 1)
        for position in range(20)
        for draw in (0, 1)
    ]

    def drawn(seed, prompt, position, draw):
        return uniform(sampled(seed=seed, prompt_index=prompt), position, draw)

    forth = {place: drawn(*place) for place in places}
    random.Random(0).shuffle(places)
    assert {place: drawn(*place) for place in places} == forth
    assert len(set(forth.values())) == len(places)


def test_a_token_does_not_depend_on_what_was_drawn_before():
    row = torch.randn(50, generator=torch.Generator().manual_seed(0))
    forth = [draw_token(row, sampled(seed=3), position) for position in range(30)]
    back = [draw_token(row, sampled(seed=3), position) for position in reversed(range(30))]
    assert forth == back[::-1]
    assert len(set(forth)) > 5


def test_greedy_takes_the_first_of_equals():
    assert draw_token(logits(1, 5, 5, 2), Sampling(), 9) == 1
    assert draw_token(logits(0, 0, 0), Sampling(), 9) == 0
    assert draw_token(logits(-INF, -3, -INF), Sampling(), 9) == 1


@pytest.mark.parametrize("position", range(8))
def test_a_tiny_top_p_is_greedy_and_ties_go_to_the_smaller_id(position):
    assert draw_token(logits(1, 5, 5, 2), sampled(top_p=1e-9), position) == 1
    assert draw_token(logits(1, 5, 5, 2), sampled(top_p=0.0), position) == 1


def kept_tokens(row, **sampling):
    return {draw_token(row, sampled(**sampling), position) for position in range(400)}


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass():
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert kept_tokens(row, top_p=1.0) == {0, 1, 2, 3}
    assert kept_tokens(row, top_p=0.91) == {0, 1, 2, 3}
    assert kept_tokens(row, top_p=0.89) == {1, 2, 3}
    assert kept_tokens(row, top_p=0.69) == {1, 3}
    assert kept_tokens(row, top_p=0.39) == {1}


def test_of_equally_likely_tokens_top_p_keeps_the_smaller_ids():
    assert kept_tokens(logits(2, 2, 2, 2), top_p=0.5) == {0, 1}
    assert kept_tokens(logits(2, 2, 2, 2), top_p=0.51) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    row, draws = logits(0.0, 1.0, -1.0, 0.5, -2.0), 20_000
    counts = [0] * 5
    for position in range(draws):
        counts[draw_token(row, sampled(temperature=temperature, seed=11), position)] += 1
    expected = torch.softmax(row.double() / temperature, 0) * draws
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected.tolist(), strict=True))
    # Four degrees of freedom: a right sampler is above 18.5 once in a thousand seeds.
    assert chi_square < 18.5


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(
    "row",
    [
        logits(3e38, -3e38, 0.0),
        logits(-3e38, -INF, -INF),
        logits(-1e30, -2e30, -3e30),
        logits(5.0, -INF, -INF),
    ],
)
def test_extreme_logits_leave_the_one_likely_token(row, top_p, temperature):
    for position in range(4):
        assert draw_token(row, sampled(temperature, top_p), position) == 0


def test_a_token_of_no_mass_is_never_drawn():
    row = logits(-INF, 0.0, -INF, 0.0)
    assert kept_tokens(row, top_p=1.0) == {1, 3}


def test_logits_with_a_nan_draw_no_token():
    logits = torch.tensor([1.0, float("nan"), 3.0])
    assert draw_token(logits, Sampling(), 5) == NO_TOKEN
    assert draw_token(logits, Sampling(temperature=1.0), 5) == NO_TOKEN
