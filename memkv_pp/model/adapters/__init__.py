"""One adapter per model family, on an allow-list; ``load_stage`` is the only way to build a stage."""

from pathlib import Path

import torch

from memkv_pp.model.adapters.assembly import assemble_stage
from memkv_pp.model.adapters.base import Adapter, StageModel
from memkv_pp.model.adapters.deepseek_v3 import ADAPTER as DEEPSEEK_V3
from memkv_pp.model.adapters.gemma3 import ADAPTER as GEMMA3
from memkv_pp.model.adapters.gemma4 import ADAPTER as GEMMA4
from memkv_pp.model.adapters.gpt_oss import ADAPTER as GPT_OSS
from memkv_pp.model.adapters.lfm2 import ADAPTER as LFM2
from memkv_pp.model.adapters.llama import ADAPTER as LLAMA
from memkv_pp.model.adapters.mistral import ADAPTER as MISTRAL
from memkv_pp.model.adapters.qwen2 import ADAPTER as QWEN2
from memkv_pp.model.adapters.qwen3 import ADAPTER as QWEN3
from memkv_pp.model.adapters.qwen3_5 import ADAPTER as QWEN3_5
from memkv_pp.model.adapters.qwen3_next import ADAPTER as QWEN3_NEXT
from memkv_pp.model.hf_config import family_of, model_config
from memkv_pp.model.weights import WeightSource, open_weights

ADAPTERS: dict[str, Adapter] = {
    adapter.family: adapter
    for adapter in (
        LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_NEXT, QWEN3_5, GEMMA3, GEMMA4, GPT_OSS, LFM2, DEEPSEEK_V3,
    )
}  # fmt: skip


def load_stage(
    path: Path,
    *,
    layers: range,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    source: WeightSource | None = None,
) -> StageModel:
    """The absolute ``layers`` of a GGUF file or a Hugging Face folder, and nothing else of it.

    ``first`` adds the embedding, ``last`` the final norm and the head. Weights are read one
    tensor at a time from ``source`` (by default the files at ``path``) and dequantised to
    ``dtype``. Raises ModelError for a family without an adapter, for what the family's adapter
    does not serve, and for a tensor that is missing, has another shape, or would be ignored.
    """
    config = model_config(path)
    return assemble_stage(
        ADAPTERS[family_of(config)],
        config,
        open_weights(path) if source is None else source,
        path=path,
        layers=layers,
        first=first,
        last=last,
        dtype=dtype,
        device=torch.device(device),
    )
