from pathlib import Path

import pytest

from memkv_pp.errors import ConfigError, ModelError
from memkv_pp.model.ggml_types import GGML_TYPES
from memkv_pp.model.gguf_header import read_header
from memkv_pp.testing.gguf_files import Tensor, Typed, write_gguf

SMOLLM2 = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TENSORS = (Tensor("token_embd.weight", (32, 5), "Q8_0"), Tensor("blk.0.attn_q.weight", (32, 2)))


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(tmp_path, version):
    metadata = {
        "general.architecture": "llama",
        **{
            f"x.{kind}": Typed(kind, value)
            for kind, value in {
                "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 7, "i32": -3, "u64": 2**63,
                "i64": -(2**62), "f32": 0.5, "f64": 0.25, "bool": True, "string": "é",
            }.items()
        },
        "x.ints": [1, 2, 3],
        "x.flags": [True, False],
        "x.words": ["a", "", "ccc"],
        "x.none": Typed("u32", []),
    }  # fmt: skip
    header = read_header(write_gguf(tmp_path / "a.gguf", metadata, version=version))
    assert header.version == version
    assert header.architecture == "llama"
    assert header.metadata["x.u64"] == 2**63
    assert header.metadata["x.i64"] == -(2**62)
    assert header.metadata["x.bool"] is True
    assert header.metadata["x.string"] == "é"
    assert header.metadata["x.f64"] == 0.25
    assert header.metadata["x.ints"] == (1, 2, 3)
    assert header.metadata["x.flags"] == (True, False)
    assert header.metadata["x.words"] == ("a", "", "ccc")
    assert header.metadata["x.none"] == ()
    assert len(header.metadata) == len(metadata)


def test_the_directory_gives_shapes_offsets_and_bytes(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, TENSORS, alignment=64)
    header = read_header(path)
    first, second = header.tensors
    assert (first.name, first.shape, first.type_name) == ("token_embd.weight", (32, 5), "Q8_0")
    assert (first.offset, first.num_bytes, first.num_elements) == (0, 5 * 34, 160)
    assert (second.offset, second.num_bytes, second.num_elements) == (192, 256, 64)
    assert header.alignment == 64
    assert header.data_offset % 64 == 0
    assert header.data_offset + 192 + 256 == header.file_bytes
    header.check_extents()


def test_a_header_without_data_is_legal_until_its_weights_are_asked_for(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf", {"general.architecture": "llama"}, TENSORS, with_data=False
    )
    header = read_header(path)
    assert len(header.tensors) == 2
    with pytest.raises(ModelError, match=r"token_embd\.weight.*ends at byte"):
        header.check_extents()


def test_the_first_tensor_past_the_end_is_the_one_that_is_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, TENSORS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight"):
        read_header(path).check_extents()


def test_tokenizer_arrays_are_built_only_when_asked_for(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "bb", ""],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.model": "gpt2",
        "after": 1,
    }
    path = write_gguf(tmp_path / "a.gguf", metadata)
    header = read_header(path)
    assert header.metadata == {"tokenizer.ggml.model": "gpt2", "after": 1}
    assert header.skipped == {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.token_type": 3}
    asked = read_header(path, want={"tokenizer.ggml.tokens"})
    assert asked.metadata["tokenizer.ggml.tokens"] == ("a", "bb", "")
    assert asked.skipped == {"tokenizer.ggml.token_type": 3}
    assert read_header(path, want=["tokenizer."]).skipped == {}


def test_a_long_per_layer_array_is_read_whole(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"x.head_count_kv": list(range(5000))})
    assert read_header(path).metadata["x.head_count_kv"] == tuple(range(5000))


@pytest.mark.slow
def test_the_table_of_tensor_types_is_ggmls():
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    assert {kind: tuple(entry) for kind, entry in GGML_TYPES.items()} == theirs


def test_a_missing_file_names_the_model(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL.*nothing\.gguf"):
        read_header(tmp_path / "nothing.gguf")


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="the small model is not under .models/")
def test_a_real_file_opens_without_its_vocabulary():
    header = read_header(SMOLLM2)
    assert header.skipped == {
        "tokenizer.ggml.tokens": 49152,
        "tokenizer.ggml.token_type": 49152,
        "tokenizer.ggml.merges": 48900,
    }
    assert not any(
        isinstance(value, tuple) and len(value) > 1 for value in header.metadata.values()
    )
    assert len(header.tensors) == 272
    header.check_extents()
