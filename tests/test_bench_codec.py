"""The codec suite agrees with its peers before it measures, and leaves the threads as they were."""

import pytest
import torch

from memkv_pp.bench import codec, ggml
from memkv_pp.cache import host_kernels
from memkv_pp.formats import FORMATS


@pytest.mark.slow
def test_every_format_is_measured_both_ways_beside_its_peers():
    if host_kernels.load() is None:
        pytest.skip(host_kernels.status().found)
    before = torch.get_num_threads()
    rows = list(codec.run(rounds=1, num_records=2))
    assert torch.get_num_threads() == before
    measured = {row.name for row in rows if row.peer == "memcpy"}
    names = {name for name, fmt in FORMATS.items() if not fmt.exponent}
    ways = ("quantise", "dequantise")
    assert measured == {f"codec/{name}/{way}" for name in names for way in ways}
    assert {row.name for row in rows if row.peer == "torch"} == {
        name for name in measured if "/f32/" not in name
    }
    peers = {(row.name, row.peer) for row in rows if row.peer.startswith("ggml")}
    if ggml.find() is None:
        assert not peers
    else:
        expected = {(f"codec/{name}/{way}", "ggml") for name in ggml.TYPES for way in ways}
        assert peers == expected | {("codec/q8_0/quantise", "ggml-chunk")}
    assert all(row.ratio == row.ours / row.peer_value > 0 for row in rows)
    assert {(row.unit, row.threads) for row in rows} == {("GB/s", 1)}
