"""The decode suite: a whole model's steps over rows that are attended in place, and unpacked."""

import pytest
import torch

from memkv_pp.bench import decode
from memkv_pp.cache import host_kernels
from memkv_pp.errors import InternalError
from memkv_pp.formats import parse_pair
from memkv_pp.testing.tiny_models import write_tiny_model

CONTEXTS = {"tiny": 40}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    if host_kernels.load() is None:
        pytest.skip(host_kernels.status().found)
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, "llama", layers=2, head_size=64, heads=2, kv_heads=1)


def test_kernels_set_aside_are_found_again():
    kernels = host_kernels.load()
    with host_kernels.set_aside():
        assert host_kernels.loaded() is host_kernels.load() is None
    assert host_kernels.loaded() is kernels


@pytest.mark.slow
def test_every_pair_is_measured_beside_unpacked_rows_with_and_without_kernels(tiny):
    before = torch.get_num_threads()
    rows = list(decode.run(tiny, rounds=1, contexts=CONTEXTS))
    assert torch.get_num_threads() == before
    pairs = [str(parse_pair(pair)) for pair in decode.PAIRS]
    assert [(row.name, row.peer) for row in rows] == [
        (f"decode/tiny/{pair}", peer) for pair in pairs for peer in ("gather", "torch")
    ]
    assert all(row.ratio == row.ours / row.peer_value > 0 for row in rows)
    assert {row.unit for row in rows} == {"tokens/s"}


@pytest.mark.slow
def test_a_side_with_other_logits_is_not_measured(tiny, monkeypatch):
    monkeypatch.setattr(decode, "_AGREEMENT", 0.0)
    with pytest.raises(InternalError, match="logits differ from gather's"):
        list(decode.run(tiny, rounds=1, contexts=CONTEXTS))
