"""Figures for a paper as SVG and PDF, and the results as CSV, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from asymgrpo.errors import UserError
from asymgrpo.experiment.comparison import Comparison
from asymgrpo.experiment.store import write_atomically
from asymgrpo.report.curves import CHARTS, Chart, Curve, chart_curves, labels_of
from asymgrpo.report.distributions import gradient_histograms, pass_curves, rollout_kl
from asymgrpo.report.rollouts import read_rollouts
from asymgrpo.report.sources import Source
from asymgrpo.report.summary import MISSING, Cell, Table, tables

COLOURS = ["#4d5866", "#d55e00", "#0072b2", "#008f68", "#b4508c", "#a87400", "#6b52ae", "#2a93c8"]
LINES = ("-", "--")
MARKERS = {"positive": ".", "negative": "x"}
SIZE = (3.4, 2.6)
"""Inches: a column of a two-column paper."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "svg.hashsalt": "asymgrpo",
}
"""Type 42 keeps text as text, which journals ask for; the salt makes equal figures equal files."""

Painter = Callable[[Axes], None]


def write_figures(
    sources: Sequence[Source], comparison: Comparison, folder: str | Path
) -> list[Path]:
    """Every figure as SVG and PDF and the results as CSV, LaTeX and JSON; returns the files."""
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise UserError(f"{place} is a file; --figures wants a folder")
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for key, painter in painters(sources, comparison).items():
        written += _save(painter, place / key)
    results = tables(comparison)
    written.append(_write(place / "table.csv", to_csv(results)))
    written.append(_write(place / "table.tex", to_latex(results)))
    text = json.dumps(finite(comparison.to_dict()), indent=2, allow_nan=False) + "\n"
    written.append(_write(place / "comparison.json", text))
    return written


def painters(sources: Sequence[Source], comparison: Comparison) -> dict[str, Painter]:
    """What can be drawn of these runs: a file name, and a function that draws it."""
    colours = {label: COLOURS[n % len(COLOURS)] for n, label in enumerate(labels_of(sources))}
    found: dict[str, Painter] = {}
    for chart in CHARTS:
        curves = chart_curves(chart, sources, comparison)
        if curves:
            found[chart.key] = _curve_painter(chart, curves, colours)
    if pass_curves(comparison):
        found["passk"] = lambda axes: _paint_pass(axes, comparison, colours)
    if gradient_histograms(sources):
        found["gradient-histogram"] = lambda axes: _paint_histogram(axes, sources, colours)
    rows = {
        name: [row for step in steps.values() for row in step]
        for name, steps in read_rollouts(sources).items()
    }
    if rollout_kl(sources, rows):
        found["kl-rollouts"] = lambda axes: _paint_kl(axes, rollout_kl(sources, rows), colours)
    return found


def _curve_painter(chart: Chart, curves: Sequence[Curve], colours: Mapping[str, str]) -> Painter:
    def paint(axes: Axes) -> None:
        for curve in curves:
            part, tone = chart.metrics.index(curve.metric), colours[curve.label]
            name = as_text(curve.label) if part == 0 else None
            axes.plot(curve.steps, curve.mean, LINES[part], color=tone, label=name)
            if len(curve.runs) > 1 or curve.interval:
                axes.fill_between(
                    curve.steps, curve.low, curve.high, color=tone, alpha=0.15, linewidth=0
                )
        axes.set(xlabel="step", ylabel=chart.title)
        for line, name in zip(LINES, chart.names, strict=False):
            axes.plot([], [], line, color="black", linewidth=0.8, label=name)
        if chart.log:
            axes.set_yscale("log")
            _plain_ticks(axes, "y")
        elif chart.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return paint


def _paint_pass(axes: Axes, comparison: Comparison, colours: Mapping[str, str]) -> None:
    ks: set[int] = set()
    for curve in pass_curves(comparison):
        ks |= set(curve.k)
        tone, before = colours[curve.label], curve.moment == "before"
        name, form = (None, "--") if before else (as_text(curve.label), "o-")
        axes.plot(curve.k, curve.mean, form, color=tone, markersize=3, label=name)
        if not before:
            axes.fill_between(curve.k, curve.low, curve.high, color=tone, alpha=0.15, linewidth=0)
    axes.set(xlabel="k", ylabel="pass@k")
    if any(curve.moment == "before" for curve in pass_curves(comparison)):
        axes.plot([], [], "--", color="black", linewidth=0.8, label="before training")
    axes.set_xscale("log")
    axes.set_xticks(sorted(ks), [str(k) for k in sorted(ks)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _paint_histogram(axes: Axes, sources: Sequence[Source], colours: Mapping[str, str]) -> None:
    for item in gradient_histograms(sources):
        axes.stairs(item.share, item.edges, color=colours[item.label], label=as_text(item.label))
    axes.set(xlabel="gradient norm", ylabel="share of steps")
    axes.set_xscale("log")
    _plain_ticks(axes, "x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _paint_kl(axes: Axes, groups: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    for item in groups:
        marker = MARKERS[item["sign"]]
        name = as_text(item["label"]) if item["sign"] == "positive" else None
        axes.plot(
            item["steps"],
            item["kl"],
            linestyle="",
            marker=marker,
            markersize=3,
            markeredgewidth=0.6,
            alpha=0.7,
            color=colours[item["label"]],
            label=name,
        )
    for sign, marker in MARKERS.items():
        axes.plot([], [], linestyle="", marker=marker, markersize=3, color="black", label=sign)
    axes.set(xlabel="step", ylabel="KL of a rollout (nats)")


def _plain_ticks(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _save(painter: Painter, stem: Path) -> list[Path]:
    written = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        painter(axes)
        entries = len(axes.get_legend_handles_labels()[0])
        if entries > 1:  # above the axes, where it covers no data
            figure.legend(loc="outside upper center", ncols=min(entries, 3))
        # Without a date, the same runs give the same bytes.
        for suffix, metadata in ((".svg", {"Date": None}), (".pdf", {"CreationDate": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix[1:], metadata=metadata)
            path = stem.with_name(stem.name + suffix)
            write_atomically(path, buffer.getvalue())
            written.append(path)
    return written


def as_text(label: str) -> str:
    r"""A label that matplotlib shows as it stands: no mathematics, no hidden legend entry.

    >>> print(as_text("a$b$"))
    a\$b\$
    """
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in label)
    text = text.replace("$", r"\$")
    return "\N{ZERO WIDTH SPACE}" + text if text.startswith("_") else text


# tables


def to_csv(results: Iterable[Table]) -> str:
    """One row a label; a number with an interval takes three columns."""
    rows: dict[str, dict[str, str]] = {}
    for table in results:
        for row in table.rows:
            record = rows.setdefault(row.label, {"label": row.label})
            for name, cell in zip(table.columns[1:], row.cells, strict=True):
                record |= _csv_cells(name, cell)
    fields = list(dict.fromkeys(name for record in rows.values() for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: no_formula(value) for key, value in row.items()} for row in rows.values()
    )
    return out.getvalue()


def no_formula(cell: str) -> str:
    """A cell that a spreadsheet does not take for a formula; a number stays one.

    >>> no_formula("=1+1"), no_formula("-0.5")
    ("'=1+1", '-0.5')
    """
    try:
        float(cell)
    except ValueError:
        return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
    return cell


def _csv_cells(name: str, cell: Cell) -> dict[str, str]:
    if cell.estimate is None:
        return {name: "" if cell.value == MISSING else cell.value}
    cells = {name: repr(cell.estimate.value)}
    if cell.estimate.low is not None and cell.estimate.high is not None:
        cells |= {f"{name} low": repr(cell.estimate.low), f"{name} high": repr(cell.estimate.high)}
    return cells


def to_latex(results: Iterable[Table]) -> str:
    """Tables for `booktabs`, ready to be input."""
    parts = ["% needs \\usepackage{booktabs}"]
    for table in results:
        lines = [f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", "\\toprule"]
        lines.append(" & ".join(latex(name) for name in table.columns) + " \\\\")
        lines.append("\\midrule")
        for row in table.rows:
            cells = [latex(row.label), *(_latex_cell(cell) for cell in row.cells)]
            lines.append(" & ".join(cells) + " \\\\")
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def _latex_cell(cell: Cell) -> str:
    return latex(f"{cell.value} ({cell.interval})" if cell.interval else cell.value)


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
}


def latex(text: str) -> str:
    r"""The text as LaTeX prints it.

    >>> print(latex("alpha_1 = 50 % {x} \\input"))
    alpha\_1 = 50 \% \{x\} \textbackslash{}input
    """
    plain = re.sub(r"[\x00-\x1f\x7f]+", " ", text)
    return "".join(LATEX.get(character, character) for character in plain)


def finite(value: Any) -> Any:
    """Plain data whose numbers JSON can hold; what is not finite is null.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> Path:
    write_atomically(path, text.encode("utf-8", "replace"))
    return path
