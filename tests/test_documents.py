"""Every block of every document runs, in order, in a fresh folder; links lead somewhere.

The word after a block's fence says what it is: `python` and `sh` are run, `text` is something to
read. `gpu`, `hub` or `cluster` behind it say what else a block needs, as does its first line, to
the reader; those are listed here, so that none is left out in silence.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"gpu": "GPU", "hub": "hub", "cluster": "cluster"}
NOT_RUN_HERE = {
    ("README.md", "# needs a model from the hub, with a reward function and a data set of yours"),
    ("running.md", "# needs a GPU, and the hub for the model and the data"),
    ("precision.md", "# needs a GPU"),
}
"""Blocks that need more than this machine; a comparison in them is planned, not run."""
MAKE_ELSEWHERE = {"test", "lint", "bench", "fuzz", "lock", "gpu-check"}
"""Targets that hold or surround this test, or need more than this machine; that they exist is all
that is asked here."""
SMALL = [
    *("--steps", "2", "--set", "per_device_train_batch_size=8", "--set", "num_generations=4"),
    *("--set", "steps_per_generation=2", "--set", "max_completion_length=24"),
    *("--set", "eval_problems=4", "--set", "eval_samples=2", "--set", "report_to=none"),
]
"""What makes a demonstration one of seconds; the command is otherwise as it stands."""


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    needs: tuple[str, ...]
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.document, self.text.splitlines()[0]


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        fenced = re.findall(
            r"^```([^\n]*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.S | re.M
        )
        for info, text in fenced:
            language, *needs = info.split() or [""]
            yield Block(path.name, language, tuple(needs), text)


def lines_of(text: str) -> Iterator[str]:
    """The commands of a shell block: a line each, and a line `... <<'EOF'` down to its end."""
    lines = iter(text.splitlines())
    for line in lines:
        opened = re.search(r"<<'(\w+)'$", line)
        if opened is None:
            yield line
            continue
        below = iter(lambda: next(lines), opened[1])
        yield "\n".join([line, *below, opened[1]])


def run_line(line: str) -> None:
    """One command of a shell block."""
    if "\n" in line:
        subprocess.run(["sh", "-ec", line], check=True)
        return
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "make":
        run_make(words[1])
    elif words[0] == "asymgrpo":
        run_command(words[1:])
    else:
        subprocess.run(["sh", "-ec", line], check=True)


def run_make(target: str) -> None:
    recipes = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipes, f"no target {target}"
    if target in MAKE_ELSEWHERE:
        return
    for line in recipes[0].splitlines():
        run_line(line.strip().removeprefix("$(BIN)/"))


def run_command(words: list[str], *, dry: bool = False) -> None:
    from asymgrpo import cli

    if words[0] in ("train", "compare"):
        words = [*words, *SMALL, *(["--seeds", "1"] if words[0] == "compare" else [])]
        words += ["--dry-run"] if dry else []
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, (words, result.output)


def test_every_block_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `make demo` on, as a reader would; nothing but the demonstration is in the folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, dict[str, Any]] = {}
    with registries_kept():
        for block in blocks():
            if block.needs:
                for line in block.text.splitlines():
                    if line.startswith("asymgrpo compare"):
                        run_command(shlex.split(line)[1:], dry=True)
            elif block.language == "sh":
                for line in lines_of(block.text):
                    run_line(line)
            elif block.language == "python":
                space = names.setdefault(block.document, {"__name__": "document"})
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(block.text, block.document, "exec"), space)
    made = {path.parent.name for path in (tmp_path / "runs" / "demo").glob("*/run.json")}
    assert made == {f"{name}-seed0" for name in ("grpo", "ah-grpo", "sa-ah-grpo", "abc-grpo")}
    assert not (tmp_path / "runs" / "demo" / "run.json").exists()  # no document adds a run to it


@contextlib.contextmanager
def registries_kept() -> Iterator[None]:
    """What a document adds to a registry is taken back."""
    from asymgrpo.objective import horizon, presets, ratio

    registries: tuple[dict[str, Any], ...] = (ratio.CLIPS, horizon.APPLIES_TO, presets.ALGORITHMS)
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, content in zip(registries, before, strict=True):
            registry.clear()
            registry.update(content)


def test_every_block_says_what_it_is() -> None:
    for block in blocks():
        assert block.language in ("python", "sh", "text"), block.key
        assert set(block.needs) <= set(NEEDS), block.key
        if block.language == "text":
            assert not re.search(r"^(asymgrpo|make|pip|python) ", block.text, re.M), block.key
        for need in block.needs:
            assert NEEDS[need] in block.key[1], f"tell the reader as well: {block.key}"


def test_what_is_not_run_is_listed() -> None:
    assert {block.key for block in blocks() if block.needs} == NOT_RUN_HERE
    told = [line.split()[1] for b in blocks() if b.language == "sh" for line in b.text.splitlines()
            if line.startswith("make ")]  # fmt: skip
    assert set(told) - {"demo"} <= MAKE_ELSEWHERE


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [t for t, _ in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing
    for target, anchor in targets:
        if anchor and target.endswith(".md"):
            headings = re.findall(r"^#+ (.*)$", (path.parent / target).read_text(), re.M)
            known = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor[1:] in known, (target, anchor)
