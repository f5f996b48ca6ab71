"""The code in the documents runs, and their relative links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a document, one after another, in one module; new names are taken back."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)
    if not blocks:
        pytest.skip("no Python in it")
    from asymgrpo.objective import horizon, presets, ratio

    monkeypatch.chdir(tmp_path)
    registries = (ratio.CLIPS, horizon.APPLIES_TO, presets.ALGORITHMS)
    before = [dict(registry) for registry in registries]
    try:
        exec(compile("\n".join(blocks), path.name, "exec"), {"__name__": "document"})
    finally:
        for registry, content in zip(registries, before, strict=True):
            registry.clear()
            registry.update(content)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing
