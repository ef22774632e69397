"""What every family's adapter shares: the stage model, and the way its layers reach our cache.

transformers supplies the decoder layers; the loop over them, the cache and the masks are ours.
Legend: T tokens of a packed step, R rows that want logits, H hidden size, V vocabulary, QH and
KH query and KV heads, D and DV key and value head sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig

from memkv_pp.errors import InternalError

ATTENTION_NAME = "memkv_pp"


class Attend(Protocol):
    """The cache's side of one attention layer; the caller binds the step's sequences into it."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Append ``key [T, KH, D]`` and ``value [T, KH, DV]``, then attend with ``query [T, QH, D]``.

        ``layer`` is absolute; all three are contiguous, rotated, in the compute dtype. Returns
        ``[T, QH, DV]``. ``scale`` multiplies the products of query and key.
        """
        ...


class Rotary(NamedTuple):
    """``cos`` and ``sin``, ``[1, T, D]`` each, computed in f32 and then cast to the compute dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


class AttentionShape(NamedTuple):
    """One layer's attention: head counts, elements per head, and the scale of its products."""

    query_heads: int
    kv_heads: int
    key_head_size: int
    value_head_size: int
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """How one family maps onto transformers' modules.

    ``window_knob`` is the key of config.json that gives layers of the family a sliding window.
    """

    family: str
    decoder_layer: Callable[[Any, int], nn.Module]
    norm: Callable[[int, float], nn.Module]
    rotary: Callable[[Any], nn.Module]
    window_knob: str = ""


class StageModel:
    """The weights of one stage's layers, with the embedding and the head where they belong.

    Holds no cache and no step state: every call is a function of its arguments and the weights,
    and may run under ``torch.inference_mode``. Built by ``load_stage``.
    """

    def __init__(
        self,
        *,
        family: str,
        config: PreTrainedConfig,
        layers: Mapping[int, nn.Module],
        rotary: nn.Module,
        embedding: torch.Tensor | None,
        norm: nn.Module | None,
        head: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.family = family
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size
        self.vocabulary_size: int = config.vocab_size
        self.dtype = dtype
        self.device = device
        self._query_heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._layers = dict(layers)
        self._rotary = rotary
        self._embedding = embedding
        self._norm = norm
        self._head = head

    @property
    def layers(self) -> tuple[int, ...]:
        """The absolute indices of the layers held, in order."""
        return tuple(self._layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the distinct storages of the weights held: a tied head on this stage is free."""
        tensors = [p for layer in self._layers.values() for p in layer.parameters()]
        tensors += [t for t in (self._embedding, self._head) if t is not None]
        tensors += [] if self._norm is None else list(self._norm.parameters())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def attention(self, layer: int) -> AttentionShape:
        """The heads and the scale of ``layer``."""
        module: Any = self._layer(layer).self_attn
        return AttentionShape(
            self._query_heads, self._kv_heads, module.head_dim, module.head_dim, module.scaling
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 token ids to ``[T, H]``; only on the first stage."""
        if self._embedding is None:
            _not_here("embedding", "first")
        return functional.embedding(token_ids, self._embedding)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """The rotations of ``[T]`` int64 positions, the same for every layer: once per step."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Rotary(*self._rotary(like, position_ids=positions[None]))

    def run_layer(
        self, layer: int, hidden: torch.Tensor, rotary: Rotary, attend: Attend
    ) -> torch.Tensor:
        """One decoder layer, by absolute index, over ``hidden [T, H]``; returns ``[T, H]``.

        ``attend`` is called exactly once, with this layer's index. Rows do not see each other
        except through it, so any packing of sequences is the caller's to choose.
        """
        output = self._layer(layer)(
            hidden[None], attention_mask=None, position_embeddings=rotary, memkv_attend=attend
        )
        return output[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm and output projection of ``[R, H]``: ``[R, V]`` f32 logits; only on the last stage."""
        if self._norm is None or self._head is None:
            _not_here("head", "last")
        return functional.linear(self._norm(hidden), self._head).float()

    def _layer(self, layer: int) -> Any:
        found = self._layers.get(layer)
        if found is None:
            raise InternalError(f"layer {layer} is not on this stage, which holds {self.layers}")
        return found


def _not_here(part: str, stage: str) -> NoReturn:
    raise InternalError(f"the {part} is not on this stage: it was not loaded as the {stage} one")


def _attend_packed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    memkv_attend: Attend,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature, ``[1, heads, T, size]`` in, over an ``Attend``."""
    if attention_mask is not None:
        raise InternalError("a mask reached the cache's attention, which makes its own")
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return memkv_attend(module.layer_idx, query, key, value, scaling)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_packed)
