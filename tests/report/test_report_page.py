"""The page as a file: what it holds, what it escapes, and what it may load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import run_record, write_runs

from asymgrpo.errors import UserError
from asymgrpo.experiment.compare import compare_runs, load_runs
from asymgrpo.experiment.store import RunStore
from asymgrpo.report import build_report
from asymgrpo.report.page import script_json


class Elements(HTMLParser):
    """The elements of a page, with the text of its scripts and styles."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.bodies: dict[str, list[str]] = {"script": [], "style": []}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag
        if tag in self.bodies:
            self.bodies[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.bodies:
            self.bodies[self.inside][-1] += data


def test_the_verdict_comes_first_and_is_the_comparison_s(report: Path, runs: Path) -> None:
    text = report.read_text(encoding="utf-8")
    headline = compare_runs(load_runs(sorted(runs.iterdir()))).headline
    sentence = re.search(r'class="sentence">([^<]*)<', text)
    assert sentence is not None
    assert sentence[1] == headline
    assert text.index('class="sentence"') < text.index("<table") < text.index('id="curves"')


def test_only_the_page_s_own_scripts_may_run(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    page = Elements(text)
    policy = next(a["content"] for t, a in page.found if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    scripts = [attributes for tag, attributes in page.found if tag == "script"]
    for attributes, body in zip(scripts, page.bodies["script"], strict=True):
        assert "src" not in attributes
        if attributes.get("type") == "application/json":
            json.loads(body)
        else:
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
    outside = [a for t, a in page.found if t in ("link", "img", "iframe", "object", "embed")]
    assert outside == []
    links = [a["href"] for t, a in page.found if t == "a"]
    assert all(link is not None and link.startswith("#") for link in links)


@pytest.mark.parametrize(
    "text", ["</script>", "<!--<script>", "]]>", "\u2028\u2029", "\ud800", "&"]
)
def test_script_json_is_inert_and_whole(text: str) -> None:
    written = str(script_json({"text": text}))
    assert not re.search("[<>&\u2028\u2029\ud800]", written)
    assert json.loads(written) == {"text": text}


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    bad = "<img src=x onerror=alert(1)>{{ 7 * 7 }}"
    store.write_run(run_record(bad, bad, 0, 1) | {"label": bad, "model": bad, "status": bad})
    store.append_metrics(1, {"reward/mean": 1.0})
    text = build_report([store.folder], tmp_path / "out.html", title=bad).read_text()
    assert "<img" not in text
    assert "{{ 7 * 7 }}" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_same_runs_give_the_same_page(runs: Path, report: Path, tmp_path: Path) -> None:
    again = build_report([runs], tmp_path / "again.html", title="Two algorithms")
    assert again.read_bytes() == report.read_bytes()


def test_a_running_run_is_reported_as_such(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", ("grpo",), seeds=1, steps=5, save_every=5, problems=2)
    store = RunStore(tmp_path / "runs" / "grpo-s0")
    store.update_run(status="interrupted")
    text = build_report([tmp_path / "runs"], tmp_path / "out.html").read_text()
    assert "grpo-s0 is interrupted: its curves end at step 5." in text


def test_out_must_be_a_file(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name a file"):
        build_report([runs], tmp_path)
    nested = build_report([runs / "grpo-s0"], tmp_path / "new" / "page.html")
    assert nested.is_file()


def test_a_single_run_needs_no_torch(runs: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from asymgrpo.report import build_report; "
        f"build_report([{str(runs / 'grpo-s0')!r}], {str(tmp_path / 'a.html')!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
