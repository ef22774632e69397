"""Where the weights of a GGUF directory belong: to a block, the embedding, or the head."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.model.figures import Figures
from memkv_pp.model.gguf_header import GGUFHeader, TensorInfo

_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
# Tables and projections of the embedding side that only the first stage reads: counted with layer 0
_FIRST_STAGE = ("token_embd_norm.", "token_types.", "position_embd.", "per_layer_", "altup_")
_LAST_STAGE = ("output", "cls.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Elements and file bytes by block (NextN blocks included), of the embedding, and of the head."""

    block_elements: tuple[int, ...]
    block_file_bytes: tuple[int, ...]
    embedding_elements: int
    embedding_file_bytes: int
    head_elements: int
    norm_elements: int
    head_file_bytes: int


def read_weights(figures: Figures, header: GGUFHeader, num_blocks: int) -> Weights:
    """Add the directory up by block, embedding and head. Rotary tables belong to nobody."""
    elements = [0] * num_blocks
    file_bytes = [0] * num_blocks
    ends: dict[str, list[TensorInfo]] = {"embedding": [], "head": [], "norm": []}
    for tensor in header.tensors:
        match = _BLOCK.match(tensor.name)
        block = int(match.group(1)) if match else 0
        if match and block >= num_blocks:
            figures.fail(
                "block_count", f"is {num_blocks}, but there is a tensor {tensor.name[:80]!r}"
            )
        if match or tensor.name.startswith(_FIRST_STAGE):
            elements[block] += tensor.num_elements
            file_bytes[block] += tensor.num_bytes
        elif tensor.name == EMBEDDING:
            ends["embedding"].append(tensor)
        elif tensor.name == _HEAD:
            ends["head"].append(tensor)
        elif tensor.name.startswith(_LAST_STAGE):
            ends["norm"].append(tensor)
    _warn_about_missing_weights(figures, header, elements)
    return Weights(
        block_elements=tuple(elements),
        block_file_bytes=tuple(file_bytes) if header.tensors else (),
        embedding_elements=sum(t.num_elements for t in ends["embedding"]),
        embedding_file_bytes=sum(t.num_bytes for t in ends["embedding"]),
        head_elements=sum(t.num_elements for t in ends["head"]),
        norm_elements=sum(t.num_elements for t in ends["norm"]),
        head_file_bytes=sum(t.num_bytes for t in (*ends["head"], *ends["norm"])),
    )


def _warn_about_missing_weights(
    figures: Figures, header: GGUFHeader, elements: Sequence[int]
) -> None:
    parts = header.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        figures.warn(f"this is one of {parts} parts; weights of the others are not counted")
    elif not header.tensors:
        figures.warn("the file lists no tensors; weights are not counted")
    else:
        bare = [index for index, count in enumerate(elements) if count == 0]
        if bare:
            figures.warn(f"no weights for {len(bare)} of {len(elements)} layers, first {bare[0]}")
