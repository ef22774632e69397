"""Plans, results, events, commands: everything that crosses a room's door, frozen.

A plan is numbered, is sent to all stages at once, and tells each what one step does, in order:
close sequences, open sequences, run rows. It carries changes only; stages remember the rest.
On the wire a plan is a header and columns of little-endian int64::

    magic | number | closed | opened | rows | tokens      (the last four are counts)
    closed[]  opened.sequence[] .seed[] .prompt_index[] .temperature[] .top_p[]
    rows.sequence[] .start[] .num_rows[] .sample[]  tokens[]

Floats travel as the bits of their IEEE double. A stage answers with ``StepDone``.
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from memkv_pp.errors import ConfigError, InternalError, StageShortfall

NO_TOKEN = -1

_MAGIC = 0x31_4E_4C_50_56_4B_4D  # "MKVPLN1" as a little-endian integer
_DONE_MAGIC = 0x31_4E_4F_44_56_4B_4D


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are drawn.

    ``temperature`` 0 is greedy. Draws are a function of (seed, prompt_index, position, draw) alone.
    ConfigError for a seed that no plan can carry.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    prompt_index: int = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed: {self.seed} is no signed 64-bit integer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt of token ids, at most ``max_new`` tokens to draw, and the ids that end it."""

    request: int
    prompt: tuple[int, ...]
    max_new: int
    sampling: Sampling = Sampling()
    end_ids: frozenset[int] = frozenset()


class Opened(NamedTuple):
    """A sequence that begins to exist on every stage with this plan."""

    sequence: int
    sampling: Sampling


class Rows(NamedTuple):
    """Rows ``[start, start + num_rows)`` of a sequence; ``sample``: a token is drawn after the last."""

    sequence: int
    start: int
    num_rows: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does. ``tokens`` are the input ids of all rows, in order."""

    number: int
    closed: tuple[int, ...]
    opened: tuple[Opened, ...]
    rows: tuple[Rows, ...]
    tokens: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return len(self.tokens)


class PoolBytes(NamedTuple):
    """Bytes in use on a stage, by pool."""

    full: int
    window: int
    state: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A stage's answer to a plan: its digest, and on the last stage the drawn tokens.

    ``lengths``: rows held of each of the plan's sequences, after the step, in the plan's order.
    ``used``: bytes in use by pool; ``sequences``: how many are open. ``tokens``: one per row entry
    with ``sample`` (empty on other stages), NO_TOKEN where the logits are NaN. ``compute_ns``: time in the layers.
    """

    stage: int
    plan: int
    lengths: tuple[int, ...]
    used: PoolBytes
    sequences: int
    tokens: tuple[int, ...] = ()
    compute_ns: int = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request was submitted."""

    request: Request


@dataclass(frozen=True, slots=True)
class StageReady:
    """A stage has loaded its weights and allocated its arena of ``allocated_bytes``."""

    stage: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class StageLost:
    """A stage died, stopped, fell silent or raised; ``kind`` is the class of its error."""

    stage: int
    message: str
    kind: str = "StageLost"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client no longer wants the request."""

    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Arrived | StageReady | StepDone | StageLost | Cancelled | Tick


@dataclass(frozen=True, slots=True)
class Admit:
    """The request holds its worst case on every stage."""

    request: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The request fits the pipeline but not now; ``stages`` are those that are short."""

    request: int
    stages: tuple[StageShortfall, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request can never be served; with ``reason`` "capacity", what each stage has and needs."""

    request: int
    reason: str
    message: str
    hint: str = ""
    stages: tuple[StageShortfall, ...] = ()


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send the plan to every stage."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Emit:
    """A token for the client, or (token None) the end.

    ``finish_reason``: "stop", "length", "cancelled" or "error"; with "error", ``error`` is the
    class name and the message.
    """

    request: int
    token: int | None
    finish_reason: str = ""
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing of the request is left on any stage."""

    request: int


Command = Admit | Wait | Refuse | SendPlan | Emit | Release


def _bits(values: Iterable[float]) -> list[int]:
    return [struct.unpack("<q", struct.pack("<d", value))[0] for value in values]


def _floats(values: Iterable[int]) -> list[float]:
    return [struct.unpack("<d", struct.pack("<q", value))[0] for value in values]


def _to_bytes(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _from_bytes(data: bytes | memoryview, magic: int, counts: int, what: str) -> "array[int]":
    column = array("q")
    if len(data) % 8:
        raise InternalError(f"{what}: {len(data)} bytes are no int64 columns")
    column.frombytes(bytes(data))
    if sys.byteorder == "big":
        column.byteswap()
    if len(column) < counts or column[0] != magic:
        raise InternalError(f"{what}: the header is damaged")
    return column


def encode_plan(plan: Plan) -> bytes:
    """The plan as int64 columns (layout in the module's docstring)."""
    samplings = [opened.sampling for opened in plan.opened]
    column = array(
        "q",
        (_MAGIC, plan.number, len(plan.closed), len(plan.opened), len(plan.rows), len(plan.tokens)),
    )
    column.extend(plan.closed)
    column.extend(opened.sequence for opened in plan.opened)
    column.extend(s.seed for s in samplings)
    column.extend(s.prompt_index for s in samplings)
    column.extend(_bits(s.temperature for s in samplings))
    column.extend(_bits(s.top_p for s in samplings))
    for field in range(4):
        column.extend(int(rows[field]) for rows in plan.rows)
    column.extend(plan.tokens)
    return _to_bytes(column)


def decode_plan(data: bytes | memoryview) -> Plan:
    """The inverse of ``encode_plan``; InternalError if the columns do not add up."""
    column = _from_bytes(data, _MAGIC, 6, "plan")
    number, closed, opened, rows, tokens = column[1:6]
    counts = (closed, opened, rows, tokens)
    if min(counts) < 0 or len(column) != 6 + closed + 5 * opened + 4 * rows + tokens:
        raise InternalError(f"plan {number}: {len(column)} integers do not hold {counts}")
    at = 6

    def take(count: int) -> "array[int]":
        nonlocal at
        at += count
        return column[at - count : at]

    closed_ids = tuple(take(closed))
    sequences, seeds, indices = take(opened), take(opened), take(opened)
    temperatures, top_ps = _floats(take(opened)), _floats(take(opened))
    samplings = [
        Sampling(seed=s, prompt_index=i, temperature=t, top_p=p)
        for s, i, t, p in zip(seeds, indices, temperatures, top_ps, strict=True)
    ]
    fields = [take(rows) for _ in range(4)]
    return Plan(
        number,
        closed_ids,
        tuple(map(Opened, sequences, samplings)),
        tuple(Rows(q, s, c, bool(f)) for q, s, c, f in zip(*fields, strict=True)),
        tuple(take(tokens)),
    )


def encode_done(done: StepDone) -> bytes:
    """A stage's answer as int64 columns."""
    head = (_DONE_MAGIC, done.stage, done.plan, done.sequences, done.compute_ns, *done.used)
    column = array("q", (*head, len(done.lengths), len(done.tokens)))
    column.extend(done.lengths)
    column.extend(done.tokens)
    return _to_bytes(column)


def decode_done(data: bytes | memoryview) -> StepDone:
    """The inverse of ``encode_done``; InternalError if the columns do not add up."""
    column = _from_bytes(data, _DONE_MAGIC, 10, "result")
    stage, plan, sequences, compute_ns, full, window, state, lengths, tokens = column[1:10]
    if min(lengths, tokens) < 0 or len(column) != 10 + lengths + tokens:
        raise InternalError(f"result of plan {plan}: the columns do not add up")
    return StepDone(
        stage,
        plan,
        tuple(column[10 : 10 + lengths]),
        PoolBytes(full, window, state),
        sequences,
        tuple(column[10 + lengths :]),
        compute_ns,
    )


def encode_event(event: StageReady | StepDone | StageLost) -> bytes:
    """What a stage sends to its coordinator: one byte that names the event, then its body."""
    if isinstance(event, StepDone):
        return b"D" + encode_done(event)
    if isinstance(event, StageReady):
        return b"R" + struct.pack("<qq", event.stage, event.allocated_bytes)
    return b"L" + json.dumps([event.stage, event.message, event.kind]).encode()


def decode_event(data: bytes | memoryview) -> StageReady | StepDone | StageLost:
    """The inverse of ``encode_event``; InternalError for an unknown kind or a damaged body."""
    kind, body = bytes(data[:1]), bytes(data[1:])
    if kind == b"D":
        return decode_done(body)
    if kind == b"R" and len(body) == 16:
        return StageReady(*struct.unpack("<qq", body))
    if kind == b"L":
        return _decode_lost(body)
    raise InternalError(f"a stage sent a message of unknown kind {kind!r}")


def _decode_lost(body: bytes) -> StageLost:
    try:
        fields: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InternalError(f"a stage's last message is damaged: {error}") from error
    match fields:
        case [int(stage), str(message), str(kind)]:
            return StageLost(stage, message, kind)
        case _:
            raise InternalError("a stage's last message is damaged: it is not stage, message, kind")
