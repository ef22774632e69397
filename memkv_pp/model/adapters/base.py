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


class StepCache(Protocol):
    """What the cache does for one step's rows; its owner binds the step's sequences into it.

    Layers are absolute, and each is called at most once in a step.
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append ``key [T, KH, D]`` and ``value [T, KH, DV]``, then attend with ``query [T, QH, D]``.

        All are rotated, in the compute dtype. Returns ``[T, QH, DV]``. ``scale`` multiplies the
        products of query and key; ``cap`` and ``sinks``, f32 ``[QH]``, as in
        ``cache.attention.PackedAttention``. A layer that shares another's rows has neither key nor
        value. Latent rows are one key, ``[T, 1, D]``, and its first elements as the value.
        """
        ...

    def convolve(
        self,
        layer: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """Causal depthwise convolution of ``rows [T, C]`` behind the rows kept: ``[T, C]``.

        ``weight``: ``[C, kernel]``, the last tap for the row itself; ``bias``: ``[C]``.
        """
        ...

    def scan(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """The gated delta rule over rows in order, from the state kept: ``[T, VH, DV]``.

        ``query`` and ``key [T, KH, D]`` come normalised, the query scaled; ``value [T, VH, DV]``;
        ``gate``, the logarithm of the decay, and ``beta`` are f32 ``[T, VH]``.
        """
        ...


class Rotary(NamedTuple):
    """``cos`` and ``sin``, ``[1, T, D]`` each, computed in f32 and then cast to the compute dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


Rotaries = Mapping[str, Rotary]
"""The rotations of a step by kind of layer (``Adapter.rope_of``); "" where all have one."""


def run_decoder_layer(
    module: nn.Module, hidden: torch.Tensor, rotary: Rotary, cache: StepCache
) -> torch.Tensor:
    """One of transformers' decoder layers over ``hidden [T, H]``; its mixer finds ``memkv_cache``."""
    output = module(
        hidden[None], attention_mask=None, position_embeddings=rotary, memkv_cache=cache
    )
    return output[0]


def rope_by_layer_type(config: Any, layer: int) -> str:
    """``Adapter.rope_of`` for families whose layer types turn differently."""
    return config.layer_types[layer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """How one family maps onto transformers' modules.

    ``decoder_layer`` makes the module of an absolute layer, which ``run`` runs; ``norm`` makes the
    final one, named ``norm_name`` in the checkpoint; ``rotary`` the rotations, of which ``rope_of``
    says the kind a layer takes. Served are config.json's ``layer_types``, and the ``rope_types``:
    frequencies of others depend on the longest sequence of a batch, and a row's result would depend
    on its company. ``refusal`` says what else of a configuration is not served, in words, or "".
    With ``has_experts``, rows that chose one expert share products of varying shape.
    ``embedding_scale`` multiplies the embedding's rows; ``logit_cap`` bounds the logits as
    ``cap * tanh(logits / cap)``, 0 does not.
    """

    family: str
    decoder_layer: Callable[[Any, int], nn.Module]
    norm: Callable[[Any], nn.Module]
    rotary: Callable[[Any], nn.Module]
    run: Callable[[nn.Module, torch.Tensor, Rotary, StepCache], torch.Tensor] = run_decoder_layer
    rope_of: Callable[[Any, int], str] = lambda config, layer: ""
    layer_types: tuple[str, ...] = ("full_attention",)
    rope_types: tuple[str, ...] = ("default", "linear", "yarn", "llama3")
    refusal: Callable[[Any], str] = lambda config: ""
    has_experts: Callable[[Any], bool] = lambda config: False
    norm_name: str = "model.norm"
    embedding_scale: Callable[[Any], float] = lambda config: 1.0
    logit_cap: Callable[[Any], float] = lambda config: 0.0


class StageModel:
    """The weights of one stage's layers, with the embedding and the head where they belong.

    Holds no cache and no step state: every call is a function of its arguments and the weights,
    and may run under ``torch.inference_mode``. Built by ``load_stage``.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        config: PreTrainedConfig,
        layers: Mapping[int, nn.Module],
        rotary: nn.Module,
        embedding: torch.Tensor | None,
        norm: nn.Module | None,
        head: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.family = adapter.family
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size
        self.vocabulary_size: int = config.vocab_size
        self.dtype = dtype
        self.device = device
        self._adapter = adapter
        self._layers = dict(layers)
        self._ropes = {layer: adapter.rope_of(config, layer) for layer in layers}
        self._embedding_scale = adapter.embedding_scale(config)
        self._logit_cap = adapter.logit_cap(config)
        self.has_experts = adapter.has_experts(config)
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

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 token ids to ``[T, H]``; only on the first stage."""
        if self._embedding is None:
            _not_here("embedding", "first")
        rows = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            # The scale is rounded to the compute dtype, as the families that have one train it.
            rows = rows * torch.tensor(self._embedding_scale, dtype=self.dtype, device=self.device)
        return rows

    def rotary(self, positions: torch.Tensor) -> Rotaries:
        """The rotations of ``[T]`` int64 positions for every kind of layer held: once per step."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return {
            kind: Rotary(
                *self._rotary(
                    like, position_ids=positions[None], **({"layer_type": kind} if kind else {})
                )
            )
            for kind in dict.fromkeys(self._ropes.values())
        }

    def run_layer(
        self, layer: int, hidden: torch.Tensor, rotaries: Rotaries, cache: StepCache
    ) -> torch.Tensor:
        """One decoder layer, by absolute index, over ``hidden [T, H]``; returns ``[T, H]``.

        ``cache`` is called with this layer's index. Rows do not see each other except through it,
        so any packing of sequences is the caller's to choose.
        """
        module = self._layer(layer)
        return self._adapter.run(module, hidden, rotaries[self._ropes[layer]], cache)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm and output projection of ``[R, H]``: ``[R, V]`` f32 logits; only on the last stage."""
        if self._norm is None or self._head is None:
            _not_here("head", "last")
        logits = functional.linear(self._norm(hidden), self._head)
        if self._logit_cap:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits.float()

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
    memkv_cache: StepCache,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature, ``[1, heads, T, size]`` in, over a ``StepCache``.

    A module that says ``is_kv_shared_layer`` brings keys and values that are not its own.
    """
    if attention_mask is not None:
        raise InternalError("a mask reached the cache's attention, which makes its own")
    shares = getattr(module, "is_kv_shared_layer", False)
    rows = [None if shares and t is not query else _rows(t) for t in (query, key, value)]
    assert rows[0] is not None
    out = memkv_cache.attend(
        module.layer_idx,
        rows[0],
        rows[1],
        rows[2],
        scaling,
        cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None], None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    return heads[0].transpose(0, 1).contiguous()


AttentionInterface.register(ATTENTION_NAME, _attend_packed)
