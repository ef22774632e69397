"""The tables and bars of ``plan``."""

from collections.abc import Sequence

from memkv_pp.cli.output import Bars, Table
from memkv_pp.plan.alternatives import PlannedChange
from memkv_pp.plan.capacity_plan import Alternative, CapacityPlan
from memkv_pp.plan.explain import Explanation
from memkv_pp.plan.pool_shares import PARTS, StageShares, stage_parts
from memkv_pp.units import format_size


def plan_table(plan: CapacityPlan) -> Table:
    """The answer in the title, and a row per stage."""
    columns = (
        "stage", "layers", "device", "weights", "cache budget", "context", "stranded",
        "capacity tokens", "sequences",
    )  # fmt: skip
    capacity = "any number of" if plan.capacity_tokens is None else plan.capacity_tokens
    return Table(
        title=f"{plan.model}: {capacity} tokens in one sequence,"
        f" {plan.sequences} sequence(s) of {plan.context_tokens};"
        f" stage {plan.binding_stage} binds, {format_size(plan.stranded_bytes)} stranded",
        columns=columns,
        rows=[
            (
                str(row.stage),
                f"[{row.layers[0]}, {row.layers[1]})",
                *(
                    format_size(size)
                    for size in (
                        row.device_bytes,
                        row.weight_bytes,
                        row.cache_budget_bytes,
                        row.context_bytes,
                        row.stranded_bytes,
                    )
                ),
                _or_any(row.capacity_tokens),
                _or_any(row.sequences),
            )
            for row in plan.stages
        ],
        numbers=frozenset(columns) - {"layers"},
    )


def plan_bars(plan: CapacityPlan, shares: Sequence[StageShares]) -> Bars:
    """A bar per stage: weights, fixed, reserve, the pools in use, stranded."""
    return Bars(
        title="bytes",
        parts=PARTS,
        rows=[
            (f"stage {row.stage}", stage_parts(row, share))
            for row, share in zip(plan.stages, shares, strict=True)
        ],
    )


def explained_tables(explanation: Explanation) -> list[Table | Bars]:
    """The pools, and the sentences of ``--explain``."""
    columns = ("stage", "pool", "units", "bytes each", "bytes", "stranded units", "stranded bytes")
    pools = [
        (
            str(share.stage),
            pool.pool,
            str(pool.units),
            str(pool.unit_bytes),
            str(pool.bytes),
            str(pool.stranded_units),
            str(pool.stranded_bytes),
        )
        for share in explanation.stages
        for pool in share.pools
    ]
    tables: list[Table | Bars] = [
        Table(title="pools", columns=columns, rows=pools, numbers=frozenset(columns) - {"pool"}),
        Table(title="why", columns=("reason",), rows=[(line,) for line in explanation.says]),
    ]
    if explanation.alternatives:
        tables.append(sentences("what would change", "change", explanation.alternatives))
    return tables


def sentences(title: str, column: str, says: Sequence[Alternative | PlannedChange]) -> Table:
    """A sentence per alternative."""
    return Table(title=title, columns=(column,), rows=[(one.says,) for one in says])


def _or_any(value: int | None) -> str:
    return "any" if value is None else str(value)
