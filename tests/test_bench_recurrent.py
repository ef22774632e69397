"""The recurrent suite agrees with its peers before it measures, and leaves the threads as they were."""

import pytest
import torch

from memkv_pp.cache import host_kernels


@pytest.mark.slow  # transformers takes seconds to import
def test_every_row_is_measured_beside_its_peer():
    from memkv_pp.bench import recurrent

    if host_kernels.load() is None:
        pytest.skip(host_kernels.status().found)
    before = torch.get_num_threads()
    rows = list(recurrent.run(rounds=1, prefill_rows=8))
    assert torch.get_num_threads() == before
    assert {(row.name, row.peer) for row in rows} == {
        ("recurrent/decode-1", "transformers"),
        ("recurrent/decode-1/commit", "scan"),
        ("recurrent/decode-4", "transformers"),
        ("recurrent/decode-4/commit", "scan"),
        ("recurrent/prefill-8", "transformers"),
        ("recurrent/prefill-8/over-chunks", "chunks"),
        ("recurrent/short-conv-1", "torch"),
        ("recurrent/short-conv-4", "torch"),
        ("recurrent/short-conv-8", "torch"),
    }
    assert all(row.ratio == row.peer_value / row.ours > 0 for row in rows)
    assert {(row.unit, row.threads) for row in rows} == {("ms", 2)}
