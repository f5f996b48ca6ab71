"""A page in a browser, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Watched:
    """A page in the browser, with what it said and what it asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any):
        context.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._heard(message))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = path.resolve().as_uri()
        self.page.goto(self.address)
        self.settle()

    def settle(self) -> None:
        """Wait until all charts are drawn."""
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def choose(self, group: str, value: str) -> None:
        self.page.locator(f"#{group} input[value={value}]").check(force=True)

    def go_to_step(self, step: int) -> None:
        """Move the slider as a reader does, by its keys."""
        steps = self.page.evaluate("view.run.steps")
        slider = self.page.locator("#token-step")
        slider.focus()
        slider.press("Home")
        for _ in range(steps.index(step)):
            slider.press("ArrowRight")

    def pick_run(self, name: str) -> None:
        names = self.page.evaluate("view.runs.map((run) => run.run)")
        self.page.select_option("#token-run", str(names.index(name)))

    def close(self) -> None:
        self.context.close()
