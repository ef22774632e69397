"""Rows and state slots for tests and benches of recurrent layers.

Shape legend: as in ``cache.recurrent_ops``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memkv_pp.cache.recurrent_ops import SpanTable, delta_rule, no_outputs, state_of

POISON = 0xFF  # of every byte: a NaN in f32


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What the gated delta rule takes of each row, in the order of its arguments."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor

    def arguments(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """All of them."""
        return self.query, self.key, self.value, self.gate, self.beta

    def part(self, begin: int, end: int) -> "DeltaRows":
        """Rows [begin, end)."""
        rows = slice(begin, end)
        query = None if self.query is None else self.query[rows]
        return DeltaRows(query, self.key[rows], self.value[rows], self.gate[rows], self.beta[rows])

    def to(self, device: str) -> "DeltaRows":
        """The rows on ``device``."""
        query = None if self.query is None else self.query.to(device)
        key, value, gate, beta = (
            x.to(device) for x in (self.key, self.value, self.gate, self.beta)
        )
        return DeltaRows(query, key, value, gate, beta)

    def without_queries(self) -> "DeltaRows":
        """The same rows, of which only the state is wanted."""
        return replace(self, query=None)


def delta_rows(
    num_rows: int,
    key_heads: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DeltaRows:
    """Normal rows: keys and queries of length 1, queries scaled, gates in [-0.3, 0], betas in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.nn.functional.normalize(
            torch.randn(num_rows, key_heads, key_size, generator=generator), dim=-1
        )
        for _ in range(2)
    )
    value = torch.randn(num_rows, heads, value_size, generator=generator)
    gate = torch.rand(num_rows, heads, generator=generator) * -0.3
    beta = torch.rand(num_rows, heads, generator=generator)
    return DeltaRows((query * key_size**-0.5).to(dtype), key.to(dtype), value.to(dtype), gate, beta)


def state_slots(num_slots: int, slot_bytes: int, *, device: str = "cpu") -> Tensor:
    """uint8 [N, slot bytes], all poison."""
    return torch.full((num_slots, slot_bytes), POISON, dtype=torch.uint8, device=device)


def exact_scan(states_NHKV: Tensor, table: SpanTable, rows: DeltaRows) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] and all states after a scan, in f64; nothing is written."""
    states = states_NHKV.double().cpu()
    new = states.clone()
    out = no_outputs(rows.value.double(), rows.query)
    for first, num_rows, read, written in table.entries:
        part = rows.part(first, first + num_rows)
        seen, state = delta_rule(state_of(states, read), *part.arguments())
        out[first : first + num_rows] = seen
        if written >= 0:
            new[written] = state
    return out, new
