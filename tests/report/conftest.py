"""One browser and one set of simulated runs for all tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_runs
from watched import Watched

from asymgrpo.report import build_report

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "runs"
    write_runs(folder, ("grpo", "sa-ah-grpo"), seeds=2, steps=200, save_every=100, problems=20)
    return folder


@pytest.fixture(scope="session")
def report(runs: Path) -> Path:
    return build_report([runs], runs.parent / "report.html", title="Two algorithms")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("no Chromium here; apt-get install chromium to run the page's tests")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Watched] = []

    def open_it(path: Path, **context: Any) -> Watched:
        opened.append(Watched(browser, path, **context))
        return opened[-1]

    yield open_it
    for watched in opened:
        watched.close()
