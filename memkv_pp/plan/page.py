"""A plan as one self-contained page: no script, no request, every text escaped.

::

    title and figures | stages as bars | layers as a strip | table | why | changes | command
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.plan.capacity_plan import CapacityPlan, StagePlan
from memkv_pp.plan.explain import Explanation
from memkv_pp.plan.pool_shares import PARTS, StageShares, stage_parts
from memkv_pp.units import format_size

BAR_WIDTH = 1000
BAR_HEIGHT = 36
STRIP_HEIGHT = 32
STRIP_MARGIN = 7

_LAYER_CLASSES = {
    LayerKind.FULL: "full-records",
    LayerKind.LATENT: "full-records",
    LayerKind.SLIDING: "window-records",
    LayerKind.RECURRENT: "state-slots",
    LayerKind.SHORT_CONV: "state-slots",
    LayerKind.SHARED: "shared",
}


def render_page(
    geometry: ModelGeometry, plan: CapacityPlan, explanation: Explanation, command: str
) -> str:
    """The page of ``plan``; ``command`` is the line that makes it again."""
    style = files("memkv_pp.plan").joinpath("page.css").read_text(encoding="utf-8")
    warnings = f"<h2>Assumed</h2>{_list(plan.warnings)}" if plan.warnings else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(plan.model)}: memkv-pp plan</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(plan.model)}</h1>
<p class="faint">on {len(plan.stages)} pipeline stage(s), fence {_cuts(plan.fence)}</p>
{_figures(plan)}
<h2>Stages</h2>
{_stages(plan, explanation.stages)}
<h2>Layers</h2>
{_layers(geometry, plan)}
<h2>Table</h2>
{_table(plan)}
<h2>Why</h2>
{_list(explanation.says)}
<h2>What would change</h2>
{_list([one.says for one in explanation.alternatives]) or "<p>Nothing that was tried.</p>"}
{warnings}
<h2>Command</h2>
<pre><code>{escape(command)}</code></pre>
</main>
</body>
</html>
"""


def _figures(plan: CapacityPlan) -> str:
    figures = (
        ("tokens in one sequence", _count(plan.capacity_tokens)),
        (f"sequences of {plan.context_tokens:,}", f"{plan.sequences:,}"),
        ("binding stage", str(plan.binding_stage)),
        ("stranded", format_size(plan.stranded_bytes)),
    )
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures)
    return f'<dl class="figures">{items}</dl>'


def _stages(plan: CapacityPlan, shares: Sequence[StageShares]) -> str:
    largest = max(row.device_bytes for row in plan.stages)
    parts = [stage_parts(row, share) for row, share in zip(plan.stages, shares, strict=True)]
    shown = {name for stage in parts for name, _ in stage}
    stages = "\n".join(
        _stage(row, drawn, largest, binds=row.stage == plan.binding_stage)
        for row, drawn in zip(plan.stages, parts, strict=True)
    )
    return f"{_legend((_class(name), name) for name in PARTS if name in shown)}\n{stages}"


def _stage(row: StagePlan, parts: Sequence[tuple[str, int]], largest: int, *, binds: bool) -> str:
    scale = BAR_WIDTH / max(largest, 1)
    rectangles: list[str] = []
    start = 0
    for name, size in parts:
        rectangles.append(
            f'<rect class="{_class(name)}" x="{start * scale:.2f}" y="1" width="{size * scale:.2f}"'
            f' height="{BAR_HEIGHT - 2}"><title>{escape(name)}: {size:,} bytes</title></rect>'
        )
        start += size
    words = ", ".join(f"{name} {format_size(size)}" for name, size in parts)
    badge = '<span class="binds">binds</span>' if binds else ""
    exact = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_exact(value))}</dd></div>"
        for name, value in asdict(row).items()
    )
    return f"""<section class="stage">
<header><h3>Stage {row.stage}</h3>{badge}
<span class="faint">layers {_range(row)}, {format_size(row.device_bytes)}</span></header>
<svg class="bar" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" role="img"
 aria-label="{escape(words)}"><rect class="room" x="0" y="1" width="{row.device_bytes * scale:.2f}"
 height="{BAR_HEIGHT - 2}"/>{"".join(rectangles)}</svg>
<p class="faint">{escape(words)}</p>
<details><summary>exact figures</summary><dl class="exact">{exact}</dl></details>
</section>"""


def _layers(geometry: ModelGeometry, plan: CapacityPlan) -> str:
    width = BAR_WIDTH / geometry.num_layers
    cells = "".join(
        f'<rect class="{_LAYER_CLASSES[layer.kind]}" x="{i * width:.2f}" y="{STRIP_MARGIN}"'
        f' width="{width * 0.86:.2f}" height="{STRIP_HEIGHT - 2 * STRIP_MARGIN}">'
        f"<title>layer {i}: {escape(layer.kind)}</title></rect>"
        for i, layer in enumerate(geometry.layers)
    )
    cuts = "".join(
        f'<line class="cut" x1="{cut * width - width * 0.07:.2f}" y1="0"'
        f' x2="{cut * width - width * 0.07:.2f}" y2="{STRIP_HEIGHT}"/>'
        for cut in plan.fence[1:-1]
    )
    kinds = dict.fromkeys(layer.kind for layer in geometry.layers)
    legend = _legend(
        (_LAYER_CLASSES[kind], f"{kind} ({sum(x.kind is kind for x in geometry.layers)})")
        for kind in kinds
    )
    return (
        f'<svg class="strip" viewBox="0 0 {BAR_WIDTH} {STRIP_HEIGHT}" preserveAspectRatio="none"'
        f' role="img" aria-label="{geometry.num_layers} layers, cut at'
        f' {_cuts(plan.fence)}">{cells}{cuts}</svg>{legend}'
    )


def _table(plan: CapacityPlan) -> str:
    columns = (
        "stage", "layers", "device", "weights", "cache budget", "context", "stranded",
        "capacity tokens", "sequences",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    rows = "\n".join(
        "<tr>"
        + "".join(
            f'<td data-label="{name}">{escape(value)}</td>'
            for name, value in zip(columns, _cells(row), strict=True)
        )
        + "</tr>"
        for row in plan.stages
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _cells(row: StagePlan) -> tuple[str, ...]:
    return (
        str(row.stage),
        _range(row),
        format_size(row.device_bytes),
        format_size(row.weight_bytes),
        format_size(row.cache_budget_bytes),
        format_size(row.context_bytes),
        format_size(row.stranded_bytes),
        _count(row.capacity_tokens),
        _count(row.sequences),
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10"'
        f' height="10"/></svg>{escape(words)}</li>'
        for name, words in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _class(part: str) -> str:
    return part.replace(" ", "-")


def _count(value: int | None) -> str:
    return "any number" if value is None else f"{value:,}"


def _exact(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)})"
    return f"{value:,}" if isinstance(value, int) else "any number"


def _range(row: StagePlan) -> str:
    return f"[{row.layers[0]}, {row.layers[1]})"


def _cuts(fence: Sequence[int]) -> str:
    return ",".join(str(cut) for cut in fence)
