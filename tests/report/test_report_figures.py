"""Figures and tables for a paper."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from synthetic import write_runs

from asymgrpo.errors import UserError
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.figures import painters, to_csv, to_latex, write_figures
from asymgrpo.report.page import in_order
from asymgrpo.report.sources import find_sources
from asymgrpo.report.summary import compare_sources, tables

LABEL = r"100% $\alpha_1$ {x}&~^#"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("figures")
    write_runs(place, ("grpo", "sa-ah-grpo"), seeds=2, steps=6, save_every=3, problems=8)
    for seed in range(2):
        RunStore(place / f"sa-ah-grpo-s{seed}").update_run(label=LABEL)
    return place


def test_every_chart_becomes_svg_and_pdf(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = find_sources([folder])
    comparison = compare_sources(sources)
    every = painters(sources, comparison)
    assert {
        "reward",
        "pass1",
        "entropy-sign",
        "q4",
        "passk",
        "gradient-histogram",
        "kl-rollouts",
    } <= {*every}
    some = {key: every[key] for key in ("entropy-sign", "gradient", "passk", "kl-rollouts")}
    some["gradient-histogram"] = every["gradient-histogram"]
    monkeypatch.setattr("asymgrpo.report.figures.painters", lambda *_: some)
    written = write_figures(sources, comparison, tmp_path / "figures")
    names = {path.name for path in written}
    assert names == {
        *(f"{key}.{kind}" for key in some for kind in ("svg", "pdf")),
        *("table.csv", "table.tex", "comparison.json"),
    }
    for path in written:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-")
    assert (
        json.loads((tmp_path / "figures" / "comparison.json").read_text()) == comparison.to_dict()
    )


def test_the_csv_holds_the_comparison_s_numbers(folder: Path) -> None:
    sources = find_sources([folder])
    comparison = compare_sources(sources)
    rows = list(csv.DictReader(io.StringIO(to_csv(tables(comparison)))))
    assert [row["label"] for row in rows] == [summary.label for summary in comparison.labels]
    for row, summary in zip(rows, comparison.labels, strict=True):
        assert summary.after is not None
        assert float(row["pass@1 after"]) == summary.after.value
        assert float(row["pass@1 after low"]) == summary.after.low
        assert summary.entropy_end is not None
        assert float(row["entropy at end"]) == summary.entropy_end.value


def test_latex_is_escaped(folder: Path) -> None:
    comparison = compare_sources(find_sources([folder]))
    text = to_latex(tables(comparison))
    escaped = r"100\% \$\textbackslash{}alpha\_1\$ \{x\}\&\textasciitilde{}\textasciicircum{}\#"
    assert escaped in text
    body = text.replace(escaped, "").replace(r"\%", "").split("\n", 1)[1]
    assert "%" not in body
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert line.replace(r"\&", "").count(" & ") in (6, 7, 8)


def test_figures_wants_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sources = find_sources([folder])
    comparison = compare_sources(sources)
    with pytest.raises(UserError, match="wants a folder"):
        write_figures(in_order(sources, comparison), comparison, tmp_path / "file")
