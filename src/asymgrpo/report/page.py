"""The page: one HTML file that holds all it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from asymgrpo.errors import UserError
from asymgrpo.experiment.comparison import Comparison
from asymgrpo.experiment.store import write_atomically
from asymgrpo.report.charts import distribution_charts, line_charts
from asymgrpo.report.curves import labels_of
from asymgrpo.report.rollouts import TokenPages, read_rollouts, token_pages
from asymgrpo.report.settings import compare_settings
from asymgrpo.report.sources import Source, find_sources
from asymgrpo.report.summary import compare_sources, summarise

SECTIONS = {
    "learning": ("", ""),
    "quadrants": (
        "Clip share by quadrant",
        "Tokens whose ratio leaves the bounds, by the sign of the advantage and the side, on one "
        "scale.",
    ),
    "distributions": ("Distributions", "pass@k, gradient norms, and KL rollout by rollout."),
    "cost": ("Cost", "Time and throughput."),
}
SCRIPTS = ("text.js", "theme.js", "charts.js", "cards.js", "tokens.js", "main.js")
EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""plotly adds an empty style element and fills it by rule; the hash of nothing lets it."""


@dataclass(frozen=True)
class Part:
    id: str
    name: str


def build_report(
    folders: Iterable[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    figures: str | Path | None = None,
) -> Path:
    """Write the page on the runs in `folders` to `out`, and figures and tables to `figures`.

    Each folder is a run of ours, a TRL output folder, or a folder of such.

    >>> build_report([], "report.html")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: name at least one run folder
    """
    sources = find_sources(folders)
    comparison = compare_sources(sources)
    sources = in_order(sources, comparison)
    path = Path(out)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / 'report.html'}")
    write_atomically(path, render(sources, comparison, title).encode("utf-8", "replace"))
    if figures is not None:
        from asymgrpo.report.figures import write_figures  # matplotlib takes a second to load

        write_figures(sources, comparison, figures)
    return path


def in_order(sources: Sequence[Source], comparison: Comparison) -> list[Source]:
    """Runs in the order of the comparison's labels, whose first is the baseline."""
    order = {summary.label: place for place, summary in enumerate(comparison.labels)}
    return sorted(sources, key=lambda run: order.get(run.label, len(order)))


def render(sources: Sequence[Source], comparison: Comparison, title: str | None = None) -> str:
    """The page's HTML."""
    rows = read_rollouts(sources)
    flat = {name: [row for step in steps.values() for row in step] for name, steps in rows.items()}
    pages = token_pages(sources, rows)
    charts = [
        *line_charts(sources, comparison), *distribution_charts(sources, flat, comparison)
    ]  # fmt: skip
    data = {"labels": labels_of(sources), "charts": charts, "tokens": token_index(sources, pages)}
    blocks = [{"id": "report-data", "json": script_json(data)}]
    for run, page in enumerate(pages):
        for place, content in enumerate(page.pages):
            blocks.append({"id": f"rollouts-{run}-{place}", "json": script_json(content)})
    css = asset("report.css")
    scripts = [asset("plotly-basic.min.js"), "".join(asset(name) for name in SCRIPTS)]
    settings = compare_settings(sources)
    return _template().render(
        version=package_version(),
        title=title or default_title(sources),
        policy=policy(css, scripts),
        css=Markup(css),
        scripts=[Markup(script) for script in scripts],
        blocks=blocks,
        parts=_parts(charts, pages),
        summary=summarise(comparison),
        about=about(sources),
        notes=_notes(sources),
        sections=_sections(charts),
        curve_caption=_curve_caption(sources, charts),
        several_seeds=len(labels_of(sources)) < len(sources),
        token_runs=[page for page in pages if page.shown],
        token_caption=_token_caption(pages),
        settings=settings,
        settings_caption=(
            "What differs between the variants."
            if settings.differ
            else "The runs differ in nothing."
        ),
        runs=[_run_row(run) for run in sources],
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(asset("page.html.jinja"))


def asset(name: str) -> str:
    return files("asymgrpo.report").joinpath("assets", name).read_text(encoding="utf-8")


def package_version() -> str:
    try:
        return version("asymgrpo")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


def script_json(data: Any) -> Markup:
    r"""JSON that is inert inside a script element: nothing in it can end the element or open one.

    >>> print(script_json({"text": "</script><!-- & \u2028"}))
    {"text":"\u003c/script\u003e\u003c!-- \u0026 \u2028"}
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    return Markup(re.sub("[<>&]", lambda found: escapes[found[0]], text))


def policy(css: str, scripts: Sequence[str]) -> str:
    """Only this page's own scripts and styles, by hash, and no request whatever."""
    script_hashes = " ".join(digest(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {digest(css)} {EMPTY_STYLE}; "
        "base-uri 'none'; form-action 'none'"
    )


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def token_index(sources: Sequence[Source], pages: Sequence[TokenPages]) -> list[dict[str, Any]]:
    """What the token view needs before it opens a step."""
    by_name = {run.name: run for run in sources}
    return [
        {
            "run": page.run,
            "block": place,
            "label": by_name[page.run].label,
            "steps": page.steps,
            "scales": page.scales,
        }
        for place, page in enumerate(pages)
        if page.shown
    ]


# what the page says around them


def default_title(sources: Sequence[Source]) -> str:
    labels = labels_of(sources)
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)


def about(sources: Sequence[Source]) -> str:
    """One line: how many runs of what, on which model and task."""
    labels = len(labels_of(sources))
    parts = [f"{len(sources)} run{'s' if len(sources) != 1 else ''}"]
    if labels > 1:
        parts.append(f"{labels} variants")
    for name, key in (("model", "model"), ("task", "task"), ("steps", "steps"), ("on", "device")):
        values = list(dict.fromkeys(str(run.record[key]) for run in sources if run.record.get(key)))
        if values:
            parts.append(f"{name} {', '.join(values[:3])}{' …' if len(values) > 3 else ''}")
    return " · ".join(parts)


def _parts(charts: Sequence[dict[str, Any]], pages: Sequence[TokenPages]) -> list[Part]:
    parts = [Part("verdict", "Verdict"), Part("table", "Results")]
    if charts:
        parts.append(Part("curves", "Curves"))
    if any(page.shown for page in pages):
        parts.append(Part("tokens", "Tokens"))
    return [*parts, Part("settings", "Settings")]


def _sections(charts: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    used = {chart["section"] for chart in charts}
    return [
        {"id": key, "title": title, "hint": hint}
        for key, (title, hint) in SECTIONS.items()
        if key in used
    ]


def _curve_caption(sources: Sequence[Source], charts: Sequence[dict[str, Any]]) -> str:
    text = "What a log does not hold is not drawn. Drag to zoom, double-click to go back."
    if len(labels_of(sources)) < len(sources):
        text = (
            "Lines are means over seeds, bands the lowest and highest seed; of the held-out pass@1 "
            "and pass@k, the table's 95 % intervals. " + text
        )
    widths = {c["bin"] for chart in charts if chart["kind"] == "line" for c in chart["curves"]}
    if max(widths, default=1) > 1:
        text += f" Long curves are averaged over {max(widths)} steps a point."
    return text


def _token_caption(pages: Sequence[TokenPages]) -> str:
    if not pages or all(page.complete for page in pages):
        return "Every saved rollout is on this page."
    shown, read = sum(page.shown for page in pages), sum(page.read for page in pages)
    steps, saved = sum(len(page.steps) for page in pages), sum(page.saved_steps for page in pages)
    return (
        f"To keep the page small it holds {shown:,} rollouts of {steps} of the {saved} saved steps "
        f"({read:,} rollouts were read); `asymgrpo inspect RUN --step N` shows all of any step."
    )


def _notes(sources: Sequence[Source]) -> list[str]:
    notes = [f"{run.name}: {note}." for run in sources for note in run.notes]
    foreign = [run.label for run in sources if run.kind == "trl"]
    notes += [
        f"{label}: {count} TRL folders that differ by a seed in their names are taken for seeds of "
        "one variant; TRL's logs tell few of their settings."
        for label, count in Counter(foreign).items()
        if count > 1
    ]
    notes += [
        f"{run.name} is {status}: its curves end at step {run.metrics[-1]['step']}."
        for run in sources
        if (status := run.record.get("status", "finished")) != "finished" and run.metrics
    ]
    return notes


def _run_row(run: Source) -> dict[str, str]:
    return {
        "name": run.name,
        "label": run.label,
        "seed": "–" if run.seed is None else str(run.seed),
        "steps": str(run.record.get("steps") or "–"),
        "status": str(run.record.get("status") or "–"),
        "kind": run.kind,
    }
