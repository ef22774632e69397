"""What ``plan`` answers, per stage and in all. Sizes are bytes, ranges half-open."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage's row of ``plan``; the field names are the contract's keys (CLI.md).

    ``capacity_tokens`` is None where the stage fits any number of tokens, ``sequences`` where it
    fits any number of sequences. ``context_bytes + stranded_bytes == cache_budget_bytes``.
    """

    stage: int
    layers: tuple[int, int]
    device_bytes: int
    weight_bytes: int
    file_bytes: int
    fixed_bytes: int
    reserve_bytes: int
    cache_budget_bytes: int
    bytes_per_token: int
    ring_bytes_per_token: int
    ring_rows: int
    bytes_per_sequence: int
    record_bytes: int
    padding_bytes: int
    context_bytes: int
    capacity_tokens: int | None
    sequences: int | None
    stranded_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another fence that does better, and a sentence on what it gains."""

    fence: tuple[int, ...]
    capacity_tokens: int | None
    sequences: int
    stranded_bytes: int
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """The answer of ``plan``; the field names are the contract's keys (CLI.md).

    ``capacity_tokens``: the longest single sequence, in whole blocks, that fits every stage; None
    when no stage grows with the tokens. ``sequences``: how many of ``context_tokens`` each.
    """

    model: str
    fence: tuple[int, ...]
    block_tokens: int
    context_tokens: int
    capacity_tokens: int | None
    sequences: int
    binding_stage: int
    stranded_bytes: int
    stages: tuple[StagePlan, ...]
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
