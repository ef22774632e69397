"""Weight sources: names, dequantisation, row order, and what they refuse."""

import json
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from memkv_pp.errors import ModelError
from memkv_pp.model.weights import ROPE_FACTORS, GGUFWeights, SafetensorsWeights, open_weights
from memkv_pp.testing.tiny_models import write_tiny_gguf, write_tiny_model

UP = "model.layers.1.mlp.up_proj.weight"


def write_gguf(path, tensors, architecture="qwen2", metadata=()):
    """``tensors``: (GGUF name, f32 array, stored type)."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata:
        writer.add_uint32(key, value)
    for name, values, kind in tensors:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_has_the_names_and_the_values_of_the_folder(family, tmp_path):
    folder = open_weights(write_tiny_model(tmp_path, family))
    file = open_weights(write_tiny_gguf(tmp_path, family))
    assert sorted(file.names()) == sorted(folder.names())
    for name in folder.names():
        expected = folder.tensor(name, torch.float32)
        assert torch.equal(file.tensor(name, torch.float32), expected), name


def test_shards_hold_what_the_single_file_holds(tmp_path):
    single = SafetensorsWeights(write_tiny_model(tmp_path / "single", "qwen3"))
    shards = SafetensorsWeights(write_tiny_model(tmp_path / "shards", "qwen3", num_shards=3))
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) == 3
    assert sorted(shards.names()) == sorted(single.names())
    for name in single.names():
        assert torch.equal(shards.tensor(name, torch.bfloat16), single.tensor(name, torch.bfloat16))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("rows", [1, 3, 4100])
def test_rows_dequantise_as_gguf_does_whatever_the_chunk(kind, rows, tmp_path):
    stored = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((rows, 64), np.float32)
    path = write_gguf(tmp_path / "one.gguf", [("blk.1.ffn_up.weight", values, stored)])
    expected = torch.from_numpy(dequantize(quantize(values, stored), stored))
    tensor = GGUFWeights(path).tensor(UP, torch.float32)
    assert torch.equal(tensor, expected)
    assert torch.equal(GGUFWeights(path).tensor(UP, torch.bfloat16), expected.bfloat16())


def test_llama_queries_and_keys_come_back_in_halves_and_qwen_rows_stay(tmp_path):
    # Two heads of four rows; llama.cpp stores (0 2 1 3) where transformers has (0 1 2 3).
    interleaved = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)[:, None] * np.ones(32, np.float32)
    tensors = [
        ("blk.0.attn_q.weight", interleaved, GGMLQuantizationType.F32),
        ("blk.0.attn_q.bias", interleaved[:, 0].copy(), GGMLQuantizationType.F32),
        ("blk.0.attn_v.weight", interleaved, GGMLQuantizationType.F32),
    ]
    heads = [("llama.attention.head_count", 2)]
    llama = GGUFWeights(write_gguf(tmp_path / "llama.gguf", tensors, "llama", heads))
    qwen = GGUFWeights(write_gguf(tmp_path / "qwen.gguf", tensors, "qwen2"))
    prefix = "model.layers.0.self_attn"
    stored = [0, 2, 1, 3, 4, 6, 5, 7]
    for source, expected in ((llama, list(range(8))), (qwen, stored)):
        assert source.tensor(f"{prefix}.q_proj.weight", torch.float32)[:, 5].tolist() == expected
        assert source.tensor(f"{prefix}.q_proj.bias", torch.float32).tolist() == expected
        assert source.tensor(f"{prefix}.v_proj.weight", torch.float32)[:, 5].tolist() == stored


def test_a_tensor_has_its_own_storage_and_outlives_its_source(tmp_path):
    for path in (write_tiny_model(tmp_path, "llama"), write_tiny_gguf(tmp_path, "llama")):
        source = open_weights(path)
        first, second = (source.tensor(UP, torch.float32) for _ in range(2))
        kept = first.clone()
        assert first.untyped_storage().nbytes() == first.nbytes
        second.zero_()
        del source, second
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(tmp_path) not in maps.read_text()
        assert torch.equal(first, kept)
        first.add_(1)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs madvise and /proc/self/smaps")
def test_read_pages_leave_the_resident_set(tmp_path):
    values = np.ones((4096, 256), np.float32)
    path = write_gguf(
        tmp_path / "large.gguf", [("blk.1.ffn_up.weight", values, GGMLQuantizationType.F32)]
    )
    source = GGUFWeights(path)
    tensor = source.tensor(UP, torch.float32)
    assert tensor.nbytes == 4 * 1024 * 1024
    mapped = Path("/proc/self/smaps").read_text().split(path.name, 1)[1]
    resident = next(line for line in mapped.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) <= 64  # KiB


def test_rope_factors_keep_their_name(tmp_path):
    factors = np.arange(1, 17, dtype=np.float32)
    path = write_gguf(tmp_path / "f.gguf", [(ROPE_FACTORS, factors, GGMLQuantizationType.F32)])
    assert GGUFWeights(path).tensor(ROPE_FACTORS, torch.float32).tolist() == list(range(1, 17))


def test_an_absent_tensor_is_named_with_its_file(tmp_path):
    for path in (write_tiny_model(tmp_path, "llama"), write_tiny_gguf(tmp_path, "llama")):
        with pytest.raises(ModelError, match=rf"{tmp_path}.*model\.layers\.9\.mlp"):
            open_weights(path).tensor("model.layers.9.mlp.up_proj.weight", torch.float32)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "token_types.weight", "blk.x.y"])
def test_a_gguf_tensor_of_no_served_family_is_refused(name, tmp_path):
    values = np.ones((2, 32), np.float32)
    path = write_gguf(tmp_path / "odd.gguf", [(name, values, GGMLQuantizationType.F32)])
    with pytest.raises(ModelError, match=name):
        GGUFWeights(path)


def test_a_gguf_type_without_a_dequantiser_is_named(tmp_path):
    path = tmp_path / "q8_1.gguf"
    writer = GGUFWriter(path, "qwen2")
    kind = GGMLQuantizationType.Q8_1
    writer.add_tensor("blk.1.ffn_up.weight", np.zeros((2, 40), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{UP} is stored as ggml type 9"):
        GGUFWeights(path).tensor(UP, torch.float32)


def test_a_part_of_a_split_gguf_is_refused(tmp_path):
    path = write_gguf(tmp_path / "part.gguf", [], metadata=[("split.count", 3)])
    with pytest.raises(ModelError, match="3 parts"):
        GGUFWeights(path)


def test_a_truncated_gguf_is_refused_before_a_tensor_is_read(tmp_path):
    path = write_tiny_gguf(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="bytes"):
        GGUFWeights(path)


def test_a_folder_without_weights_or_with_an_absent_shard_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        SafetensorsWeights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {UP: "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-1\.safetensors.*absent"):
        SafetensorsWeights(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="no index"):
        SafetensorsWeights(tmp_path)


def test_a_checkpoint_that_is_not_plain_floats_or_no_safetensors_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({UP: torch.zeros(4, dtype=torch.int8)}, path)
    assert load_file(path)[UP].dtype is torch.int8
    with pytest.raises(ModelError, match=r"torch\.int8"):
        SafetensorsWeights(tmp_path).tensor(UP, torch.float32)
    path.write_bytes(b"no header")
    with pytest.raises(ModelError, match="not a readable safetensors"):
        SafetensorsWeights(tmp_path)
