"""The transformers configuration of a model: read from a folder, or built from GGUF metadata.

What the metadata states and this file does not understand is refused rather than ignored: an
unknown scale or a mixture of experts would give wrong text, not an error.
"""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from memkv_pp.errors import ModelError
from memkv_pp.model.gguf_header import GGUFHeader, read_header
from memkv_pp.model.kv_scales import quantises_only_the_cache
from memkv_pp.model.patterns import CANONICAL

SERVED_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "qwen3_5",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "lfm2",
    "deepseek_v3",
)
"""The families that have an adapter; a GGUF architecture has its family's name."""

_GGUF_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}

# Gemma 3 with so many layers divides its queries by hidden size over heads, all others by the size
# of a head; no key says so (llama.cpp, llama_model::load_hparams).
_GEMMA3_27B_LAYERS = 62
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_INTERVAL = 6

_NOT_SERVED = (
    "expert_count",
    "attention.scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.alpha",
)
_NEUTRAL = (None, 0, 1)


def model_config(path: Path) -> PreTrainedConfig:
    """The configuration of a Hugging Face folder or a GGUF file; reads no weights, no network.

    Raises ModelError naming the file and the family for one without an adapter, and naming the
    key for metadata that is missing or not served.
    """
    if path.is_dir():
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path}: config.json cannot be read: {error}") from error
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        check_family(family_of(config), path)
        if quantization is not None and not quantises_only_the_cache(quantization):
            raise ModelError(
                f"{path}: config.json states quantization_config: quantised matrix products are"
                " not served",
                "use the checkpoint in f32, f16 or bf16, or a GGUF file",
            )
        return config
    header = read_header(path)
    architecture = str(header.metadata.get("general.architecture"))
    family = CANONICAL.get(architecture, architecture)
    check_family(family, path, served=tuple(_GGUF_CONFIGS))
    return _GGUFMetadata(path, header, family).config()


def family_of(config: PreTrainedConfig) -> str:
    """The family of a text model's configuration, as geometries name it."""
    return config.model_type.removesuffix("_text")


def check_family(family: str, path: Path, *, served: tuple[str, ...] = SERVED_FAMILIES) -> None:
    """Raise ModelError naming the family and the ones served, unless it is one of them."""
    if family not in served:
        known = family in SERVED_FAMILIES
        raise ModelError(
            f"{path}: the family {family[:64]!r} is served from Hugging Face folders alone"
            if known
            else f"{path}: there is no adapter for the family {family[:64]!r}",
            f"families served: {', '.join(served)}",
        )


class _GGUFMetadata:
    """The metadata of one file under its architecture's prefix."""

    def __init__(self, path: Path, header: GGUFHeader, family: str) -> None:
        self._path = path
        self._family = family
        self._metadata = header.metadata
        self._shapes = {info.name: info.shape for info in header.tensors}

    def config(self) -> PreTrainedConfig:
        windows = () if self._family == "gemma3" else ("attention.sliding_window",)
        for key in (*_NOT_SERVED, *windows):
            if self._optional(key) not in _NEUTRAL:
                raise self._refusal(key, "it is not served")
        heads = self._integer("attention.head_count")
        hidden_size = self._integer("embedding_length")
        head_size = self._integer("attention.key_length", hidden_size // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_size) != head_size:
                raise self._refusal(key, f"only the head size {head_size} is served")
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_size,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length"),
            "rope_parameters": self._rope_parameters(),
            "vocab_size": self._vocabulary_size(),
            "tie_word_embeddings": "output.weight" not in self._shapes,
        }
        if self._family == "mistral":
            fields["sliding_window"] = None
        if self._family in ("llama", "qwen3"):
            fields["attention_bias"] = "blk.0.attn_q.bias" in self._shapes
        if self._family == "llama":
            fields["mlp_bias"] = "blk.0.ffn_gate.bias" in self._shapes
        if self._family == "gemma3":
            fields |= self._gemma3(fields)
        try:
            return _GGUF_CONFIGS[self._family](**fields)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self._path}: the metadata describes no model: {error}") from error

    def _gemma3(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What Gemma 3 has beyond the others; ``fields`` are what it shares with them."""
        layers, interval = fields["num_hidden_layers"], _GEMMA3_INTERVAL
        if self._optional("attention.sliding_window_pattern") is not None:
            interval = self._integer("attention.sliding_window_pattern")
        scalar = fields["head_dim"]
        if layers == _GEMMA3_27B_LAYERS:
            scalar = fields["hidden_size"] // fields["num_attention_heads"]
        local = self._number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        cap = self._optional("final_logit_softcapping")
        return {
            "sliding_window": self._integer("attention.sliding_window"),
            "layer_types": [
                "full_attention" if (index + 1) % interval == 0 else "sliding_attention"
                for index in range(layers)
            ],
            "rope_parameters": {
                "full_attention": fields["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
            "query_pre_attn_scalar": scalar,
            "final_logit_softcapping": None if cap is None else float(cap),
            "attn_logit_softcapping": None,
        }

    def _rope_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base", 10000.0),
        }
        kind = self._optional("rope.scaling.type")
        if kind in (None, "none"):
            return parameters
        if kind not in ("linear", "yarn"):
            raise self._refusal("rope.scaling.type", "served are none, linear and yarn")
        parameters |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = self._integer(
                "rope.scaling.original_context_length"
            )
            for name in ("beta_fast", "beta_slow"):
                if self._optional(f"rope.scaling.yarn_{name}") is not None:
                    parameters[name] = self._number(f"rope.scaling.yarn_{name}")
        return parameters

    def _vocabulary_size(self) -> int:
        shape = self._shapes.get("token_embd.weight", ())
        if len(shape) != 2:
            raise ModelError(f"{self._path}: tensor token_embd.weight is missing or no matrix")
        return shape[1]

    def _optional(self, key: str) -> Any:
        return self._metadata.get(f"{self._family}.{key}")

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._optional(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise self._refusal(key, "one positive whole number for all layers is needed")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._optional(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or value <= 0:
            raise self._refusal(key, "a positive number is needed")
        return float(value)

    def _refusal(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._path}: {self._family}.{key} is {self._optional(key)!r}: {why}")
