"""Weights by their Hugging Face names, one tensor at a time, dequantised as they are read.

A source maps its file and copies out only the tensor that was asked for; a stage that asks for
its own layers never holds more than those and a few megabytes of scratch.
"""

import json
import math
import mmap
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from memkv_pp.errors import ModelError
from memkv_pp.model.gguf_header import TensorInfo, read_header
from memkv_pp.units import MIB

ROPE_FACTORS = "rope_freqs.weight"
"""[rotary_size / 2] divisors of the rotary frequencies, which only GGUF files carry."""

_CHUNK_ELEMENTS = MIB // 4

GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has norms before and after both halves of a layer, and names them its own way.
_GEMMA3_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp's converter stores this architecture's norms as what they multiply by: the weight and 1.
_NORMS_PLUS_ONE = ("gemma3",)
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")

# llama.cpp's converter stores these architectures' query and key rows in interleaved pairs.
INTERLEAVED_ARCHITECTURES = ("llama", "mistral")


class WeightSource(Protocol):
    """Where a stage's weights come from. Reading does not change the source."""

    def names(self) -> Collection[str]:
        """The Hugging Face names of every tensor there is; reads no tensor data."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A fresh CPU tensor of its own storage, in torch's dimension order, as ``dtype``.

        Raises ModelError naming the tensor and the file if it is absent or of an unreadable type.
        """
        ...


def open_weights(path: Path) -> WeightSource:
    """The weights of a GGUF file, or of a Hugging Face folder with safetensors."""
    return SafetensorsWeights(path) if path.is_dir() else GGUFWeights(path)


# Where checkpoints of models that also see keep their text model, newest first.
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


class GGUFWeights:
    """The tensors of one GGUF file of the Llama, Mistral, Qwen2, Qwen3 or Gemma 3 architecture.

    The file stays mapped; after each tensor its pages leave this process's resident set. Raises
    ModelError on opening for a split file and for a tensor that none of these families has.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        header.check_extents()
        metadata: Mapping[str, Any] = header.metadata
        num_parts = metadata.get("split.count", 1)
        if num_parts > 1:
            raise ModelError(
                f"{path}: one of {num_parts} parts of a split GGUF", "merge the parts into one file"
            )
        architecture = metadata.get("general.architecture")
        self._path = path
        self._data_offset = header.data_offset
        modules = gguf_layer_names(str(architecture))
        self._infos = {
            _hugging_face_name(info.name, path, modules): info for info in header.tensors
        }
        self._norm_offset = 1.0 if architecture in _NORMS_PLUS_ONE else 0.0
        self._heads: dict[str, int] = {}
        if architecture in INTERLEAVED_ARCHITECTURES:
            heads = metadata.get(f"{architecture}.attention.head_count")
            kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
            if not isinstance(heads, int) or not isinstance(kv_heads, int):
                raise ModelError(
                    f"{path}: {architecture}.attention.head_count {heads!r} and head_count_kv"
                    f" {kv_heads!r} must be one number for all layers"
                )
            self._heads = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def names(self) -> Collection[str]:
        """See WeightSource."""
        return self._infos.keys()

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        info = self._infos.get(name)
        if info is None:
            raise ModelError(f"{self._path}: the file has no tensor for {name}")
        module = name.removesuffix(".weight").removesuffix(".bias").split(".", 3)[-1]
        if self._norm_offset and module.endswith("norm"):
            return (self._dequantised(info, name, torch.float32) - self._norm_offset).to(dtype)
        tensor = self._dequantised(info, name, dtype)
        heads = self._heads.get(module)
        return tensor if heads is None else _rows_in_halves(tensor, heads)

    def _dequantised(self, info: TensorInfo, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = tuple(reversed(info.shape))
        num_rows = math.prod(shape[:-1])
        start = self._data_offset + info.offset
        raw = np.frombuffer(self._map, np.uint8, info.num_bytes, start).reshape(num_rows, -1)
        tensor = torch.empty(shape, dtype=dtype)
        rows = tensor.view(num_rows, shape[-1])
        step = max(1, _CHUNK_ELEMENTS // shape[-1])
        try:
            kind = GGMLQuantizationType(info.type_id)
            for lo in range(0, num_rows, step):
                values = dequantize(raw[lo : lo + step], kind)
                # f32 rows come back as a view of the read-only map, which torch refuses quietly.
                values = values if values.flags.writeable else values.copy()
                rows[lo : lo + step] = torch.from_numpy(values)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self._path}: {name} is stored as ggml type {info.type_id}, which cannot be read",
                "requantise the model, for example to q8_0 or f16",
            ) from error
        self._drop_pages(start, info.num_bytes)
        return tensor

    def _drop_pages(self, start: int, num_bytes: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            page_start = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page_start, start + num_bytes - page_start)


class SafetensorsWeights:
    """The tensors of a Hugging Face folder: ``model.safetensors``, or shards with an index.

    Each file is mapped only while one tensor is copied out of it. Raises ModelError on opening
    when the folder holds neither, or an index that names an absent shard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            try:
                shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self._files = {name: folder / Path(shard).name for name, shard in shards.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"{index}: no index of safetensors shards: {error!r}") from error
        elif single.is_file():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise ModelError(
                f"{folder}: neither model.safetensors nor model.safetensors.index.json is there"
            )
        self._stored = {text_name(name): name for name in self._files}
        for shard in sorted(set(self._files.values())):
            if not shard.is_file():
                raise ModelError(
                    f"{folder}: the index names the shard {shard.name}, which is absent"
                )

    def names(self) -> Collection[str]:
        """See WeightSource."""
        return self._stored.keys()

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        stored_name = self._stored.get(name)
        if stored_name is None:
            raise ModelError(f"{self._folder}: no safetensors file has a tensor {name}")
        path = self._files[stored_name]
        with _opened(path) as file:
            try:
                stored = file.get_tensor(stored_name)
            except SafetensorError as error:
                raise ModelError(f"{path}: {name}: {error}") from error
            if stored.dtype not in _PLAIN_DTYPES:
                raise ModelError(
                    f"{path}: {name} is stored as {stored.dtype}, not as plain floats",
                    "use a checkpoint in f32, f16 or bf16",
                )
            return stored.to(dtype, copy=True)


def text_name(name: str) -> str:
    """The name of a text model's tensor, without the place a model that also sees gives it."""
    for prefix, instead in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


_PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def gguf_layer_names(architecture: str) -> dict[str, str]:
    """The modules of a layer by their GGUF names."""
    own = _GEMMA3_LAYER_NAMES if architecture == "gemma3" else {}
    return GGUF_LAYER_NAMES | own


def _hugging_face_name(name: str, path: Path, modules: Mapping[str, str]) -> str:
    whole = GGUF_NAMES.get(name)
    if whole is not None:
        return whole
    match = _GGUF_LAYER.fullmatch(name)
    module = modules.get(match.group(2)) if match else None
    if match is None or module is None:
        raise ModelError(
            f"{path}: tensor {name[:128]!r} belongs to no layer of the families served",
            "its weights would be ignored, and the output wrong",
        )
    return f"model.layers.{match.group(1)}.{module}.{match.group(3)}"


def _rows_in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from ``[pair][2]``, as llama.cpp rotates, to ``[2][pair]``.

    transformers rotates element ``i`` of a head with element ``i + head_size / 2``; llama.cpp
    rotates ``2 i`` with ``2 i + 1``. ``tensor`` is ``[heads * head_size, …]``.
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
