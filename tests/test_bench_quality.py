"""What formats cost a model's answers: teacher-forced through the cache, each row over packed rows."""

import itertools
import math

import pytest
import torch

from memkv_pp.bench import quality
from memkv_pp.errors import InternalError
from memkv_pp.formats import FORMATS, parse_format, parse_pair
from memkv_pp.testing.tiny_models import write_tiny_model

TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(97)]


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, "llama", layers=2, head_size=64, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def reader(tiny):
    return quality.Reader(tiny)


def error(reader, pair, exact, **options):
    """Mean distance of a token's log-likelihood from that over f32 rows."""
    found = reader.read(TOKENS, parse_pair(pair), **options)
    return (found.log_likelihoods - exact.log_likelihoods).abs().mean().item()


@pytest.mark.slow
def test_chunks_of_any_size_read_as_one_chunk_of_the_plain_model(reader, tiny):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny).eval()(ids).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    for chunk_rows in (1, 16, 97):
        found = reader.read(TOKENS, parse_pair("f32"), chunk_rows=chunk_rows)
        assert torch.allclose(found.log_likelihoods, expected, atol=1e-4)
        assert torch.equal(found.choices, logits.argmax(-1))
        assert found.loss() == pytest.approx(-expected.mean().item(), abs=1e-5)


def test_fewer_bits_cost_more(reader):
    exact = reader.read(TOKENS, parse_pair("f32"))
    assert error(reader, "f32", exact) == 0
    ladder = ("f16", "q8_0", "q5_1", "q4_0", "turbo2e")
    errors = [error(reader, pair, exact) for pair in ladder]
    assert 0 < errors[0] < 1e-3
    assert all(less < more for less, more in itertools.pairwise(errors))
    # Either side counts.
    between = [error(reader, pair, exact) for pair in ("q8_0:q4_0", "q4_0:q8_0")]
    assert all(errors[1] < each < errors[3] for each in between)


def test_rows_attended_in_place_and_rows_unpacked_first_read_the_same(reader):
    for pair in ("bf16", "q8_0:q5_1", "turbo4:turbo3"):
        packed, unpacked = (
            reader.read(TOKENS, parse_pair(pair), packed=packed) for packed in (True, False)
        )
        # Rounding may take a row to a neighbouring code.
        distance = (packed.log_likelihoods - unpacked.log_likelihoods).abs()
        assert distance.mean() < 0.02
        assert packed.agreement(unpacked) > 0.9


@pytest.mark.slow
def test_the_suite_has_two_rows_a_pair_beside_f16(tiny):
    before = torch.get_num_threads()
    rows = list(quality.run(tiny, pairs=("f16", "q8_0:q5_1"), tokens=TOKENS))
    assert torch.get_num_threads() == before
    assert [row.name for row in rows] == [
        *("quality/f16:f16", "quality/f16:f16/same-choice"),
        *("quality/q8_0:q5_1", "quality/q8_0:q5_1/same-choice"),
    ]
    assert {row.peer for row in rows} == {"f16"}
    assert [row.unit for row in rows[:2]] == ["nats/token", "share"]
    assert (rows[0].ratio, rows[1].ours) == (1.0, 1.0)
    loss, share = rows[2:]
    assert loss.ratio == loss.peer_value / loss.ours != 1
    assert 0.5 < share.ours == share.ratio < 1


@pytest.mark.slow
def test_a_suite_whose_exact_sides_disagree_measures_nothing(tiny, monkeypatch):
    monkeypatch.setattr(quality, "PEER", "q4_0")
    with pytest.raises(InternalError, match="nats/token of f32 rows"):
        next(quality.run(tiny, tokens=TOKENS))


def test_every_format_of_the_catalogue_is_measured():
    measured = {side for name in quality.PAIRS for side in name.split(":")}
    assert measured == set(FORMATS)
    assert all(parse_format(name) for name in measured)


@pytest.mark.slow
def test_a_real_model_reads_its_text_and_four_bits_cost_it_something(smollm2):
    names = ("f16", "q8_0:q5_1", "q4_0")
    losses = [row for row in quality.run(smollm2, pairs=names) if row.unit == "nats/token"]
    f16, default, four = (row.ours for row in losses)
    assert 2 < f16 < math.log(49152) / 2
    assert abs(default - f16) < 0.02
    assert 0.03 < four - f16 < 0.3
