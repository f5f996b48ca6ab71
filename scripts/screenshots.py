"""Screenshots of the page for the documentation, light, dark and narrow.

    python scripts/screenshots.py RUN [RUN ...] --out docs/images

Needs playwright from the dev extra and a Chromium (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.report import build_report

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders, as for `asymgrpo report`")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--title")
    parser.add_argument("--step", type=int, help="saved step of the token pictures")
    parser.add_argument("--prefix", default="report", help="how the file names begin")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("no Chromium found; install it (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            page = build_report(arguments.runs, Path(folder) / "report.html", title=arguments.title)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        arguments.out.mkdir(parents=True, exist_ok=True)
        for path in take(page, arguments.out, browser, arguments.prefix, arguments.step):
            print(path)
    return 0


def take(page: Path, out: Path, browser: str, prefix: str, step: int | None) -> list[Path]:
    """The pictures: top, curves and tokens in light and dark, and a phone's view."""
    from playwright.sync_api import sync_playwright

    written = []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=FLAGS)
        for theme in ("light", "dark"):
            tab = open_page(chromium, page, theme, 1280, 860)
            written.append(shoot(tab, out / f"{prefix}-{theme}.png"))
            for part in ("curves", "tokens"):
                if tab.locator(f"#{part}").count():
                    prepare(tab, part, step)
                    written.append(shoot(tab, out / f"{prefix}-{part}-{theme}.png"))
            if tab.locator("#tokens").count() and beside_grpo(tab):
                written.append(shoot(tab, out / f"{prefix}-grpo-{theme}.png"))
            tab.context.close()
        tab = open_page(chromium, page, "light", 390, 844)
        written.append(shoot(tab, out / f"{prefix}-narrow.png"))
        if tab.locator("#tokens").count():
            prepare(tab, "tokens", step)
            written.append(shoot(tab, out / f"{prefix}-tokens-narrow.png"))
        chromium.close()
    return written


def open_page(chromium: Any, page: Path, theme: str, width: int, height: int) -> Any:
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1.25
    )
    tab = context.new_page()
    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("html[data-ready=yes]")
    return tab


def prepare(tab: Any, part: str, step: int | None) -> None:
    """Scroll to a part; on the tokens, pick the weight and point at a token that has one."""
    tab.mouse.move(0, 0)
    if part == "tokens":
        steps = tab.evaluate("view.run.steps")
        if step in steps:
            tab.evaluate(f"goTo({steps.index(step)})")
        choose(tab, "token-by", "weight")
    tab.evaluate(f"document.getElementById('{part}').scrollIntoView()")
    if part == "tokens":
        tokens = tab.locator(".card.negative .tok")
        if tokens.count():
            tokens.nth(min(9, tokens.count() - 1)).hover()


def beside_grpo(tab: Any) -> bool:
    if tab.locator("#token-layout input[value=grpo]").is_disabled():
        return False
    tab.mouse.move(0, 0)
    choose(tab, "token-layout", "grpo")
    tab.evaluate("document.getElementById('tokens').scrollIntoView()")
    return True


def choose(tab: Any, group: str, value: str) -> None:
    tab.locator(f"#{group} input[value={value}]").check(force=True)


def shoot(tab: Any, path: Path) -> Path:
    tab.wait_for_timeout(300)
    tab.screenshot(path=str(path))
    return path


if __name__ == "__main__":
    sys.exit(main())
