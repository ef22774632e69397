"""Tiny models with seeded random weights, as Hugging Face folders and as GGUF files.

Small enough for a test, shaped so that nothing degenerates: activations and logits have a spread
of about one to three, heads are grouped, the head size is not hidden / heads, and every byte has
a token. The same shape and seed give the same weights in both kinds of file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from memkv_pp.model.hf_config import check_family
from memkv_pp.model.weights import (
    GGUF_NAMES,
    INTERLEAVED_ARCHITECTURES,
    ROPE_FACTORS,
    gguf_layer_names,
)
from memkv_pp.testing.tiny_families import FAMILY_FIELDS, NORMS_ADD_ONE

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_KINDS = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
}

_MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("Ġ", "a"))
_SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """The shape of a tiny model; ``rope`` holds transformers' ``rope_parameters``, if not plain.

    ``vocabulary`` has room for 256 bytes, a few merges and specials: at least 268. ``bos`` says
    whether prompts start with ``<s>``. ``overrides`` go into config.json as they are.
    """

    layers: int = 5
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    intermediate: int = 128
    vocabulary: int = 320
    context: int = 2048
    tied: bool = False
    bos: bool = False
    seed: int = 0
    rope: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] | None = None


def write_tiny_model(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    **shape: Any,
) -> Path:
    """Write config.json, safetensors (in ``num_shards`` files) and a tokenizer.

    ``shape`` are the fields of TinyShape. Returns ``folder``. ModelError for an unknown family.
    """
    tiny = TinyShape(**shape)
    model = _model(folder, family, tiny)
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    stored = model.state_dict()
    if tiny.tied:
        del stored["lm_head.weight"]
    _save_weights(folder, {n: t.to(dtype) for n, t in stored.items()}, num_shards)
    _tokenizer(tiny).save_pretrained(folder)
    return folder


def write_tiny_gguf(folder: Path, family: str, *, kind: str = "f32", **shape: Any) -> Path:
    """Write the same weights as ``folder/tiny-FAMILY-KIND.gguf`` and return that path.

    ``kind`` is a key of GGUF_KINDS and applies to matrices; norms and biases are f32, as
    llama.cpp's converter leaves them, and queries and keys are interleaved where it does so.
    """
    tiny = TinyShape(**shape)
    model = _model(folder, family, tiny)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny-{family}-{kind}.gguf"
    writer = GGUFWriter(path, family)
    _add_metadata(writer, tiny)
    _add_rope(writer, model, tiny)
    if family == "gemma3":
        _add_gemma3(writer, model)
    _add_vocabulary(writer, tiny)
    for name, values in _gguf_tensors(model, family, tiny):
        stored = GGUF_KINDS[kind if values.ndim == 2 else "f32"]
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _model(folder: Path, family: str, tiny: TinyShape) -> PreTrainedModel:
    check_family(family, folder)
    fields: dict[str, Any] = {
        "vocab_size": tiny.vocabulary,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.intermediate,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": tiny.context,
        "tie_word_embeddings": tiny.tied,
        "rope_parameters": dict(tiny.rope or {"rope_type": "default", "rope_theta": 10000.0}),
        "bos_token_id": _special_id("<s>"),
        "eos_token_id": _special_id("</s>"),
    }
    fields |= FAMILY_FIELDS[family]
    if "layer_types" in fields:
        # The pattern is as long as the longest of these models.
        fields["layer_types"] = fields["layer_types"][: tiny.layers]
    config = AutoConfig.for_model(
        fields.pop("model_type", family), **(fields | dict(tiny.overrides or {}))
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise, family))
    return model


def _save_weights(folder: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _scaled(name: str, noise: torch.Tensor, family: str) -> torch.Tensor:
    if noise.ndim == 1:
        around = 0.0 if name.endswith(("bias", "A_log", "sinks")) else 1.0
        if family in NORMS_ADD_ONE and name.endswith("norm.weight") and ".linear_attn." not in name:
            around = 0.0
        return around + 0.1 * noise
    if name.startswith("model.embed_tokens"):
        return noise
    spread = 3 if name.startswith("lm_head") else 1
    return noise * (spread / noise.shape[-1] ** 0.5)


def _vocabulary(tiny: TinyShape) -> list[str]:
    tokens = [*bytes_to_unicode().values(), *("".join(pair) for pair in _MERGES), *_SPECIAL_TOKENS]
    return tokens + [f"<unused{i}>" for i in range(tiny.vocabulary - len(tokens))]


def _special_id(token: str) -> int:
    return 256 + len(_MERGES) + _SPECIAL_TOKENS.index(token)


def _tokenizer(tiny: TinyShape) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(_vocabulary(tiny))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=tiny.bos,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _add_metadata(writer: GGUFWriter, tiny: TinyShape) -> None:
    writer.add_name("tiny")
    writer.add_block_count(tiny.layers)
    writer.add_context_length(tiny.context)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.intermediate)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_size)
    writer.add_value_length(tiny.head_size)
    writer.add_rope_dimension_count(tiny.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.vocabulary)


def _add_rope(writer: GGUFWriter, model: PreTrainedModel, tiny: TinyShape) -> None:
    rope = dict(tiny.rope or {})
    if "full_attention" in model.config.rope_parameters:
        rope = model.config.rope_parameters["full_attention"]
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
        exponents = torch.arange(0, tiny.head_size, 2).float() / tiny.head_size
        factors = 1.0 / (rope["rope_theta"] ** exponents) / scaled
        writer.add_tensor(ROPE_FACTORS, factors.numpy())


def _add_gemma3(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_sliding_window(config.sliding_window)
    interval = config.layer_types.index("full_attention") + 1
    writer.add_uint32("gemma3.attention.sliding_window_pattern", interval)
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    writer.add_float32("gemma3.rope.freq_base_swa", local)


def _add_vocabulary(writer: GGUFWriter, tiny: TinyShape) -> None:
    tokens = _vocabulary(tiny)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in _SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_bos_token_id(_special_id("<s>"))
    writer.add_eos_token_id(_special_id("</s>"))
    writer.add_add_bos_token(tiny.bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_tensors(
    model: PreTrainedModel, family: str, tiny: TinyShape
) -> Iterator[tuple[str, np.ndarray]]:
    whole = {hugging_face: gguf for gguf, hugging_face in GGUF_NAMES.items()}
    modules = {module: gguf for gguf, module in gguf_layer_names(family).items()}
    heads = {"self_attn.q_proj": tiny.heads, "self_attn.k_proj": tiny.kv_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if family == "gemma3" and values.ndim == 1:
            values = values + 1
        if name in whole:
            yield whole[name], values
            continue
        index, _, leaf = name.removeprefix("model.layers.").partition(".")
        module, _, side = leaf.rpartition(".")
        if family in INTERLEAVED_ARCHITECTURES and module in heads:
            halves = values.reshape(heads[module], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        yield f"blk.{index}.{modules[module]}.{side}", values
