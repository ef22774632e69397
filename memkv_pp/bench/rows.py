"""One line of a suite: a figure of ours beside a peer's, taken in the same run."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memkv_pp.errors import InternalError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """``ratio`` above 1 always means that ours is better; ``threads`` are the same on both sides."""

    name: str
    ours: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    threads: int


def higher_is_better(
    name: str, ours: float, unit: str, peer: str, peer_value: float, threads: int
) -> Row:
    """A row of rates."""
    row = lower_is_better(name, ours, unit, peer, peer_value, threads)
    return replace(row, ratio=ours / peer_value)


def lower_is_better(
    name: str, ours: float, unit: str, peer: str, peer_value: float, threads: int
) -> Row:
    """A row of times or sizes."""
    return Row(
        name=name,
        ours=ours,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        ratio=peer_value / ours,
        threads=threads,
    )


def interleaved_medians(
    contenders: Sequence[Callable[[], float]], rounds: int
) -> tuple[float, ...]:
    """Each contender's median figure over ``rounds``, taken in turns."""
    if rounds < 1:
        raise InternalError(f"{rounds} rounds measure nothing")
    figures = [[contender() for contender in contenders] for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*figures, strict=True))
