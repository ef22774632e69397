import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.rings import ALIGNMENT_ROWS, can_rewind_to, resident_rows, ring_rows, view_start


@pytest.mark.parametrize(
    ("window", "chunk", "slack", "rows"),
    [(512, 4096, 0, 4639), (512, 4096, 512, 5151), (512, 512, 64, 1119), (32, 4096, 512, 4671)],
)
def test_a_flat_ring_holds_window_chunk_slack_and_alignment(window, chunk, slack, rows):
    assert ring_rows(window, chunk=chunk, slack=slack) == rows


def test_a_paged_ring_is_rounded_up_to_whole_blocks():
    assert ring_rows(512, chunk=512, slack=64, block_tokens=16) == 1120


def test_a_sequence_takes_no_more_rows_than_it_has_tokens():
    assert resident_rows(100, 1120) == 100
    assert resident_rows(262_144, 5151) == 5151
    assert resident_rows(4096, 5151) == 4096


def test_the_view_of_a_token_starts_at_a_multiple_of_32_at_or_before_its_window():
    assert view_start(0, 512) == 0
    assert view_start(511, 512) == 0
    assert view_start(543, 512) == 32
    assert view_start(8772, 32) == 8736


def test_going_back_is_granted_only_while_the_whole_view_is_resident():
    assert can_rewind_to(4095, window=512, first_resident=3584)
    assert not can_rewind_to(4094, window=512, first_resident=3584)
    assert not can_rewind_to(0, window=512, first_resident=3584)
    assert not can_rewind_to(8200, window=32, first_resident=8704)


@given(st.integers(0, 10_000), st.integers(1, 2_000))
def test_a_view_reaches_the_window_with_at_most_31_rows_before_it(length, window):
    oldest = max(length - window + 1, 0)
    assert oldest - ALIGNMENT_ROWS < view_start(length, window) <= oldest
    assert view_start(length, window) % ALIGNMENT_ROWS == 0


@given(
    window=st.integers(1, 100),
    chunk=st.integers(1, 100),
    slack=st.integers(0, 100),
    chunks=st.integers(1, 20),
    back=st.integers(0, 100),
)
def test_after_a_full_chunk_a_ring_can_go_back_by_its_slack(window, chunk, slack, chunks, back):
    rows = ring_rows(window, chunk=chunk, slack=slack)
    length = chunks * chunk
    first_resident = max(length - rows, 0)
    before_chunk = length - chunk
    target = max(before_chunk - min(back, slack), 0)
    assert can_rewind_to(target, window=window, first_resident=first_resident)
