"""The references of recurrent layers: against transformers, torch's convolution, and f64."""

import pytest
import torch

from memkv_pp.cache.recurrent_chunks import CHUNK_ROWS, scan_delta_chunks
from memkv_pp.cache.recurrent_ops import (
    conv_states,
    copy_slots,
    delta_rule,
    matrix_states,
    roll_conv,
    scan_delta,
    short_conv,
    span_table,
)
from memkv_pp.errors import InternalError
from memkv_pp.records import state_layout
from memkv_pp.testing.geometries import recurrent_layer
from memkv_pp.testing.recurrent_rows import delta_rows, exact_scan, state_slots

# Errors of f32 sums of up to 128 terms, fed back through a few hundred rows, by numbers near 1.
F32_BOUND = 2e-6
CHUNK_BOUND = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the gated delta rule ----


@pytest.mark.slow  # transformers takes seconds to import
def test_the_rule_is_that_of_transformers():
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    rows, state = delta_rows(40, 2, 4, 16, 24), normal(4, 16, 24)
    assert rows.query is not None
    wanted, wanted_state = qwen3_next.torch_recurrent_gated_delta_rule(
        # It scales the queries itself.
        rows.query[None] * 16**0.5, rows.key[None], rows.value[None], rows.gate[None],
        rows.beta[None], initial_state=state[None], output_final_state=True,
    )  # fmt: skip
    out, new = delta_rule(state, *rows.arguments())
    torch.testing.assert_close(out, wanted[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(new, wanted_state[0], rtol=0, atol=1e-6)


def test_one_row_by_hand():
    key, value = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[3.0, 5.0]]])
    gate, beta = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]])
    state = torch.tensor([[[4.0, 8.0], [2.0, 6.0]]])
    # It decays to [[2, 4], [1, 3]], holds (2, 4) for the key, and moves a quarter towards (3, 5).
    out, new = delta_rule(state, torch.tensor([[[1.0, 1.0]]]), key, value, gate, beta)
    assert new.tolist() == [[[2.25, 4.25], [1.0, 3.0]]]
    assert out.tolist() == [[[3.25, 7.25]]]


def test_the_reference_is_within_its_bound_of_f64():
    states, rows = normal(2, 2, 32, 32), delta_rows(200, 1, 2, 32, 32)
    table = span_table([(0, 200, 0, 1)])
    exact, exact_states = exact_scan(states, table, rows)
    out = scan_delta(states, table, *rows.arguments())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=F32_BOUND)
    torch.testing.assert_close(states.double(), exact_states, rtol=0, atol=F32_BOUND)


@pytest.mark.parametrize("scan", [scan_delta, scan_delta_chunks])
def test_spans_go_from_slot_to_slot(scan):
    states, rows = normal(6, 2, 8, 8), delta_rows(9, 1, 2, 8, 8)
    before = states.clone()
    states[4:] = torch.nan
    # Row 3 is of no span; the second span has no rows, the fourth drops its state.
    table = span_table([(0, 3, 0, 1), (3, 0, 2, 3), (4, 2, -1, 4), (6, 3, 0, -1)])
    out = scan(states, table, *rows.arguments())
    assert torch.equal(states[[0, 2, 3]], before[[0, 2, 2]])
    assert states[5].isnan().all()
    assert not out[3].any()
    for first, count, start, written in ((0, 3, before[0], 1), (4, 2, torch.zeros(2, 8, 8), 4)):
        alone, state = delta_rule(start, *rows.part(first, first + count).arguments())
        torch.testing.assert_close(out[first : first + count], alone, rtol=0, atol=F32_BOUND)
        torch.testing.assert_close(states[written], state, rtol=0, atol=F32_BOUND)
    alone, _ = delta_rule(before[0], *rows.part(6, 9).arguments())
    torch.testing.assert_close(out[6:], alone, rtol=0, atol=F32_BOUND)


def test_a_scan_of_five_rows_is_five_scans_of_one():
    rows, one, five = delta_rows(5, 1, 2, 16, 8), normal(2, 2, 16, 8), normal(2, 2, 16, 8)
    out = scan_delta(five, span_table([(0, 5, 0, 1)]), *rows.arguments())
    for row in range(5):
        table = span_table([(0, 1, 0 if row == 0 else 1, 1)])
        alone = scan_delta(one, table, *rows.part(row, row + 1).arguments())
        assert torch.equal(out[row : row + 1], alone)
    assert torch.equal(one, five)


def test_a_commit_scans_the_first_rows_of_a_window_again():
    states, rows = normal(2, 2, 8, 8), delta_rows(4, 2, 2, 8, 8)
    window = span_table([(0, 4, 0, 1)])
    scan_delta(states, window, *rows.arguments())
    nothing = scan_delta(states, window.first_rows([2]), *rows.without_queries().arguments())
    assert nothing.shape == (0, 2, 8)
    assert torch.equal(states[1], delta_rule(states[0], *rows.part(0, 2).arguments())[1])


@pytest.mark.parametrize("num_rows", [1, 63, 64, 200])
def test_chunks_equal_the_scan_of_their_rows(num_rows):
    rows = delta_rows(num_rows, 2, 4, 32, 24, seed=num_rows)
    states = normal(2, 4, 32, 24)
    table = span_table([(0, num_rows, 0, 1)])
    exact, exact_states = exact_scan(states, table, rows)
    out = scan_delta_chunks(states, table, *rows.arguments())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=CHUNK_BOUND)
    torch.testing.assert_close(states.double(), exact_states, rtol=0, atol=CHUNK_BOUND)


def test_chunks_keep_apart_rows_that_decay_by_more_than_f32_holds():
    rows = delta_rows(70, 1, 1, 8, 8)
    rows.gate[:] = -60.0
    states, table = normal(2, 1, 8, 8), span_table([(0, 70, 0, 1)])
    exact, exact_states = exact_scan(states, table, rows)
    out = scan_delta_chunks(states, table, *rows.arguments())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=CHUNK_BOUND)
    torch.testing.assert_close(states.double(), exact_states, rtol=0, atol=CHUNK_BOUND)


def test_chunks_in_two_calls_or_in_company_give_the_bits_of_one():
    rows, first = delta_rows(150, 1, 2, 16, 16), normal(2, 2, 16, 16)
    whole, parts = first.clone(), first.clone()
    out = scan_delta_chunks(whole, span_table([(0, 150, 0, 1)]), *rows.arguments())
    got = [
        scan_delta_chunks(parts, span_table([(0, end - begin, read, 1)]), *part.arguments())
        for begin, end, read in ((0, CHUNK_ROWS, 0), (CHUNK_ROWS, 150, 1))
        if (part := rows.part(begin, end))
    ]
    assert torch.equal(torch.cat(got), out)
    assert torch.equal(parts, whole)
    four = torch.cat([first, first])
    table = span_table([(70, 80, 2, 3), (0, 70, 0, 1)])
    beside = scan_delta_chunks(four, table, *rows.arguments())
    assert torch.equal(beside[:70], out[:70])


# ---- the short convolution ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_is_torchs_over_the_state_and_the_rows(bias, silu, dtype):
    states, values, weight = normal(2, 10, 3), normal(7, 10).to(dtype), normal(10, 4, seed=1)
    bias_C = normal(10, seed=2) if bias else None
    seen = torch.cat([states[0], values.float().T], 1)
    wanted = torch.nn.functional.conv1d(seen[None], weight[:, None], bias_C, groups=10)[0].T
    wanted = torch.nn.functional.silu(wanted) if silu else wanted
    out = short_conv(states, span_table([(0, 7, 0, 1)]), values, weight, bias_C, silu=silu)
    assert out.dtype is dtype
    bound = 1e-6 if dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(out.float(), wanted, rtol=bound, atol=bound)
    assert torch.equal(states[1], seen[:, -3:])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_a_state_keeps_the_last_rows(count):
    states, values = normal(3, 4, 3), normal(5, 4)
    states[2] = torch.nan
    before = states.clone()
    roll_conv(states, span_table([(0, count, 0, 1), (count, 0, -1, 2)]), values)
    wanted = torch.cat([before[0].T, values[:count]])[-3:].T
    assert torch.equal(states, torch.stack([before[0], wanted, torch.zeros(4, 3)]))


def test_a_convolution_of_one_tap_has_no_state():
    states, values = torch.zeros(1, 4, 0), normal(3, 4)
    out = short_conv(states, span_table([(1, 2, 0, 0)]), values, torch.full((4, 1), 2.0))
    assert torch.equal(out, torch.cat([torch.zeros(1, 4), 2 * values[1:]]))


# ---- slots ----


def test_states_lie_in_slots_as_records_says():
    layer = recurrent_layer(key_groups=1, value_heads=2, state_size=8)
    layout = state_layout([(0, layer), (2, layer)])
    assert layout is not None
    slots, second = state_slots(3, layout.slot_bytes), layout.layers[1]
    conv = conv_states(slots, second.conv_offset, layer.conv_channels, layer.conv_kernel - 1)
    matrix = matrix_states(slots, second.state_offset, 2, 8, 8)
    conv[1], matrix[1] = 1.0, 2.0
    written = slots[1].view(torch.float32)
    begin = second.conv_offset // 4
    assert (written[begin : begin + second.conv_elements] == 1).all()
    begin = second.state_offset // 4
    assert (written[begin : begin + second.state_elements] == 2).all()
    assert written.isnan().sum() == written.numel() - second.conv_elements - second.state_elements


def test_slots_are_copied_and_zeroed_whole():
    slots = torch.arange(4 * 8, dtype=torch.uint8).view(4, 8)
    before = slots.clone()
    copy_slots(slots, [(2, 0), (-1, 3)])
    assert torch.equal(slots[:3], before[[2, 1, 2]])
    assert not slots[3].any()
    with pytest.raises(InternalError, match="slot 0 cannot be copied to 4 of 4 slots"):
        copy_slots(slots, [(0, 4)])


def test_spans_that_meet_are_refused():
    span_table([(0, 2, 0, 0), (2, 1, -1, -1), (3, 1, 1, -1), (3, 0, 1, 2), (4, 1, -1, -1)])
    with pytest.raises(InternalError, match="overlap at row 1"):
        span_table([(0, 2, 0, 1), (1, 1, 2, 3)])
    with pytest.raises(InternalError, match="meet in a slot"):
        span_table([(0, 1, 0, 1), (1, 1, 2, 1)])
    with pytest.raises(InternalError, match="meet in a slot"):
        span_table([(0, 1, 0, 1), (1, 1, 1, 2)])
    with pytest.raises(InternalError, match="a span of 2 rows has no first 3"):
        span_table([(0, 2, 0, 1)]).first_rows([3])


def test_what_does_not_fit_is_refused():
    states, rows = normal(2, 2, 8, 8), delta_rows(3, 1, 2, 8, 8)
    table = span_table([(0, 3, 0, 1)])
    with pytest.raises(
        InternalError, match=r"values \[3, 2, 8\].*do not fit states \[2, 2, 8, 4\]"
    ):
        scan_delta(states[..., :4].contiguous(), table, *rows.arguments())
    with pytest.raises(InternalError, match=r"rows \[0, 3\) from slot 0 to 2 does not lie"):
        scan_delta(states, span_table([(0, 3, 0, 2)]), *rows.arguments())
    with pytest.raises(InternalError, match=r"rows \[1, 4\) from slot 0 to 1 does not lie"):
        scan_delta(states, span_table([(1, 3, 0, 1)]), *rows.arguments())
    with pytest.raises(InternalError, match=r"weights \[8, 3\] do not fit states \[2, 8, 3\]"):
        short_conv(normal(2, 8, 3), table, normal(3, 8), normal(8, 3))
    with pytest.raises(InternalError, match="128 f32 at byte 4 do not lie in slots of 512 bytes"):
        matrix_states(state_slots(2, 512), 4, 2, 8, 8)
