"""The two pages about the objective say what the code does: names, defaults and presets."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from asymgrpo import ALGORITHMS, ObjectiveConfig, TokenTrace
from asymgrpo.objective.presets import OVERRIDES, differences
from asymgrpo.objective.trace import METRIC_SUMS

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_metric_is_defined_once():
    documented = [
        name for row in rows("metrics.md", "From the objective") for name in names(row[0])
    ]
    assert sorted(documented) == sorted([*METRIC_SUMS, "ratio/max"])


def test_every_column_of_the_trace_is_defined():
    documented = [names(row[0])[0] for row in rows("metrics.md", "Token by token")]
    assert sorted(documented) == sorted(field.name for field in fields(TokenTrace))


def test_every_override_stands_with_its_default():
    documented = {}
    for keys, default, *_ in rows("objective.md", "Override keys"):
        found = ["eps1", "eps2", "eps3", "eps4"] if ".." in keys else names(keys)
        values = default.strip("`").split(", ")
        values = values if len(values) == len(found) else values * len(found)
        documented |= dict(zip(found, values, strict=True))
    assert documented.keys() == OVERRIDES.keys()
    for key, group in OVERRIDES.items():
        config = ObjectiveConfig()
        value = getattr(config if group is None else getattr(config, group), key)
        stated = documented[key]
        if isinstance(value, bool):
            assert stated == str(value).lower()
        elif isinstance(value, float):
            assert float(stated) == pytest.approx(value, abs=0)
        else:
            assert stated == value


def test_presets_stand_with_their_differences():
    table = {
        names(name)[0]: ("".join(names(unlike)), paper)
        for name, unlike, paper in rows("objective.md", "Presets")
    }
    assert table == {
        name: (differences(preset.config), preset.paper) for name, preset in ALGORITHMS.items()
    }
