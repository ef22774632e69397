"""Building a stage: modules on the meta device, filled tensor by tensor from a weight source."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from memkv_pp.errors import ModelError
from memkv_pp.model.adapters.base import ATTENTION_NAME, Adapter, StageModel
from memkv_pp.model.kv_scales import SCALE_NAME
from memkv_pp.model.weights import ROPE_FACTORS, WeightSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Old checkpoints carry the frequencies, which the configuration states too.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# transformers holds all experts of a layer in one tensor; checkpoints have one for each.
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")


def assemble_stage(
    adapter: Adapter,
    config: PreTrainedConfig,
    source: WeightSource,
    *,
    path: Path,
    layers: range,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> StageModel:
    """A stage of ``layers`` from ``source``; ``path`` is for messages. Errors as ``load_stage``."""
    _check_served(adapter, config, path)
    if not 0 <= layers.start < layers.stop <= config.num_hidden_layers or layers.step != 1:
        raise ModelError(
            f"{path}: the stage [{layers.start}, {layers.stop}) is no part of"
            f" {config.num_hidden_layers} layers"
        )
    config._attn_implementation = ATTENTION_NAME
    filler = _Filler(source, path, dtype, device)
    modules: dict[int, nn.Module] = {}
    for index in layers:
        with torch.device("meta"):
            layer = adapter.decoder_layer(config, index)
        modules[index] = filler.fill(layer, f"model.layers.{index}")
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = filler.tensor(EMBEDDING, vocabulary) if first else None
    norm = head = None
    if last:
        with torch.device("meta"):
            norm = adapter.norm(config)
        norm = filler.fill(norm, adapter.norm_name)
        if not config.tie_word_embeddings:
            head = filler.tensor(HEAD, vocabulary)
        else:
            # A tied head shares the embedding of its own stage; alone it is a second copy.
            head = filler.tensor(EMBEDDING, vocabulary) if embedding is None else embedding
    return StageModel(
        adapter=adapter,
        config=config,
        layers=modules,
        rotary=_rotary(adapter, config, source, path, device),
        embedding=embedding,
        norm=norm,
        head=head,
        dtype=dtype,
        device=device,
    )


def _check_served(adapter: Adapter, config: PreTrainedConfig, path: Path) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= set(adapter.layer_types):
        raise ModelError(
            f"{path}: layer_types = {sorted(kinds)}: served of the family {adapter.family} are"
            f" {', '.join(adapter.layer_types)}"
        )
    if refusal := adapter.refusal(config):
        raise ModelError(f"{path}: {refusal}: that is not served of the family {adapter.family}")
    for rope in _rope_parameters(config):
        if rope["rope_type"] not in adapter.rope_types:
            raise ModelError(
                f"{path}: rope_type {rope['rope_type']!r} is not served",
                f"served: {', '.join(adapter.rope_types)}",
            )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of every kind of layer: one for all, or one by layer type."""
    parameters = config.rope_parameters
    return [parameters] if "rope_type" in parameters else list(parameters.values())


def _rotary(
    adapter: Adapter,
    config: PreTrainedConfig,
    source: WeightSource,
    path: Path,
    device: torch.device,
) -> nn.Module:
    rotary = adapter.rotary(config).to(device).eval()
    if ROPE_FACTORS in source.names():
        factors = source.tensor(ROPE_FACTORS, torch.float32).to(device)
        frequencies = rotary.get_buffer("inv_freq")
        _check_shape(path, ROPE_FACTORS, factors, frequencies.shape)
        rotary.register_buffer("inv_freq", frequencies / factors, persistent=False)
    return rotary


class _Filler:
    """Reads tensors for one stage, each checked against the shape its module expects."""

    def __init__(
        self, source: WeightSource, path: Path, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._path = path
        self._dtype = dtype
        self._device = device

    def fill(self, module: nn.Module, prefix: str) -> nn.Module:
        """Give ``module``, built on the meta device, the tensors named ``prefix.…``."""
        shapes = {f"{prefix}.{name}": t.shape for name, t in module.state_dict().items()}
        for name in self._source.names():
            known = name in shapes or _fused(name) in shapes
            known = known or _IGNORED.match(name) or SCALE_NAME.fullmatch(name)
            if name.startswith(f"{prefix}.") and not known:
                raise ModelError(
                    f"{self._path}: the configuration has no place for tensor {name}",
                    "its weights would be ignored, and the output wrong",
                )
        skip = len(prefix) + 1
        state = {name[skip:]: self.tensor(name, shape) for name, shape in shapes.items()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.requires_grad_(False).eval()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor on the stage's device; ModelError unless it has ``shape``."""
        tensor = self._experts(name, shape)
        if tensor is None:
            tensor = self._source.tensor(name, self._dtype)
        _check_shape(self._path, name, tensor, shape)
        return tensor.to(self._device)

    def _experts(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A tensor of all experts from those of each, where the checkpoint has them apart."""
        prefix, _, projection = name.rpartition(".experts.")
        parts = _EXPERT_PARTS.get(projection)
        if not parts or f"{prefix}.experts.0.{parts[0]}.weight" not in self._source.names():
            return None
        whole = torch.empty(shape, dtype=self._dtype)
        for expert in range(shape[0]):
            matrices = [
                self._source.tensor(f"{prefix}.experts.{expert}.{part}.weight", self._dtype)
                for part in parts
            ]
            found = torch.cat(matrices)
            _check_shape(self._path, f"{prefix}.experts.{expert}", found, shape[1:])
            whole[expert] = found
        return whole


def _fused(name: str) -> str:
    """The tensor of all experts that an expert's own tensor is part of; else ``name``."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    whole = next(whole for whole, parts in _EXPERT_PARTS.items() if match.group(2) in parts)
    return f"{match.group(1)}.{whole}"


def _check_shape(path: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ModelError(
            f"{path}: {name} has shape {tuple(tensor.shape)}, the configuration says {tuple(shape)}"
        )
