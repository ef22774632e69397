"""A stage's cache by pool: what the plan takes from each, and what each could still give.

::

    cache budget  | full records | window records | state slots | stranded                    |
    stranded                                     | of the pools | loose (too few) | withheld |

Stranded bytes of a pool are the units that the stage could fill if it were alone, and that no
sequence of this plan uses, because another stage (or the load that was asked for) ends first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memkv_pp.errors import InternalError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.geometry import ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan, StagePlan
from memkv_pp.plan.request import PlanRequest
from memkv_pp.sizing import Footprint, StageSizing, size_fence

POOLS = ("full records", "window records", "state slots")
PARTS = ("weights", "fixed", "reserve", *POOLS, "stranded")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShare:
    """One pool of one stage; ``bytes == units * unit_bytes``, and the same for stranded."""

    pool: str
    unit_bytes: int
    units: int
    bytes: int
    stranded_units: int
    stranded_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShares:
    """The pools that a stage has, and what else is stranded.

    ``withheld_bytes`` are beyond ``--max-stage-bytes``; ``loose_bytes`` are too few for a step.
    ``grows_by`` is what a stage alone would have more of: ``tokens`` or ``sequences``.
    """

    stage: int
    pools: tuple[PoolShare, ...]
    withheld_bytes: int
    loose_bytes: int
    grows_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``copies`` sequences of ``rows`` tokens each: what the context bytes of a plan are for.

    ``grows_by`` is what the request left open: the ``tokens`` of a sequence, or ``sequences``.
    """

    rows: int
    copies: int
    grows_by: str


def charged_load(request: PlanRequest, plan: CapacityPlan) -> Load:
    """The load of ``plan``: the longest sequence, or the contexts that were asked for."""
    if request.ctx is None and request.sequences is None:
        settled = max(plan.context_tokens, *(row.ring_rows for row in plan.stages))
        return Load(rows=plan.capacity_tokens or settled, copies=1, grows_by="tokens")
    return Load(
        rows=plan.context_tokens,
        copies=plan.sequences,
        grows_by="tokens" if request.sequences is not None else "sequences",
    )


def stage_shares(
    geometry: ModelGeometry, formats: Sequence[Pair], request: PlanRequest, plan: CapacityPlan
) -> tuple[StageShares, ...]:
    """The pools of every stage of ``plan``, which ``request`` was answered with."""
    load = charged_load(request, plan)
    sizings = size_fence(geometry, formats, Fence(plan.fence), request.options)
    shares: list[StageShares] = []
    for sizing, row in zip(sizings, plan.stages, strict=True):
        charged = sizing.context_bytes(load.rows, load.copies)
        if charged != row.context_bytes:
            raise InternalError(
                f"stage {row.stage}: the pools hold {charged} bytes, the plan charges"
                f" {row.context_bytes}"
            )
        room = request.usable_bytes(row.stage) - row.weight_bytes - row.fixed_bytes
        shares.append(_shares(sizing, load, row.cache_budget_bytes, room))
    return tuple(shares)


def stage_parts(row: StagePlan, share: StageShares) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of everything on a stage's device, in the order of ``PARTS``, zeros left out."""
    sizes = {
        "weights": row.weight_bytes,
        "fixed": row.fixed_bytes,
        "reserve": row.reserve_bytes,
        **{pool.pool: pool.bytes for pool in share.pools},
        "stranded": row.stranded_bytes,
    }
    return tuple((part, sizes[part]) for part in PARTS if sizes.get(part))


def _shares(sizing: StageSizing, load: Load, budget_bytes: int, room_bytes: int) -> StageShares:
    units = sizing.footprint(load.rows).times(load.copies)
    grows_by = load.grows_by if sizing.grows else "sequences"
    spare = _alone(sizing, load, room_bytes, grows_by).minus(units)
    unit_bytes = (sizing.record_bytes, sizing.window_record_bytes, sizing.slot_bytes)
    pools = tuple(
        PoolShare(
            pool=pool,
            unit_bytes=size,
            units=taken,
            bytes=taken * size,
            stranded_units=left,
            stranded_bytes=left * size,
        )
        for pool, size, taken, left in zip(POOLS, unit_bytes, units, spare, strict=True)
        if size
    )
    spare_bytes = room_bytes - sizing.bytes_of(units)
    return StageShares(
        stage=sizing.stage,
        pools=pools,
        withheld_bytes=budget_bytes - room_bytes,
        loose_bytes=spare_bytes - sum(pool.stranded_bytes for pool in pools),
        grows_by=grows_by,
    )


def _alone(sizing: StageSizing, load: Load, room_bytes: int, grows_by: str) -> Footprint:
    """The most that the stage could hold if no other stage were asked."""
    if grows_by == "tokens":
        rows = sizing.capacity_tokens(room_bytes, load.copies) or 0
        return sizing.footprint(max(rows, load.rows)).times(load.copies)
    fitting = sizing.sequences_within(load.rows, room_bytes)
    return sizing.footprint(load.rows).times(max(fitting or 0, load.copies))
