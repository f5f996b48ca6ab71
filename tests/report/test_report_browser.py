"""The page in a real Chromium: what it draws, what it says, and what it refuses to do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import run_record, write_runs
from watched import Watched

from asymgrpo.experiment.store import RunStore
from asymgrpo.report import build_report

LOGS = Path(__file__).parents[3] / "shared" / "data" / "trl-logs"
HALF_A_DIGIT = 5e-5  # numbers on the page have five significant digits


def number(text: str) -> float:
    return float(re.search(r"[-+]?[\d.]+(e[-+]?\d+)?", text.replace("−", "-"))[0])  # type: ignore[index]


def tip_facts(page: Any) -> dict[str, str]:
    names = page.locator("#tip dt").all_text_contents()
    return dict(zip(names, page.locator("#tip dd").all_text_contents(), strict=True))


def traces(page: Any, chart: str, metric: str) -> list[dict[str, Any]]:
    script = """([chart, metric]) => document.querySelector(`[data-chart="${chart}"]`).data
        .filter((trace) => trace.meta === metric)
        .map((trace) => ({name: trace.name, x: [...trace.x], y: [...trace.y]}))"""
    found: list[dict[str, Any]] = page.evaluate(script, [chart, metric])
    return found


def background_alpha(token: Any) -> float:
    shown = token.evaluate("(node) => getComputedStyle(node).backgroundColor")
    if shown.startswith("rgba"):
        return float(shown.rstrip(")").split(",")[-1])
    found = re.search(r"/ ([\d.e-]+)\)", shown)
    return float(found[1]) if found else 1.0


@pytest.fixture(scope="module")
def watched(browser: Any, report: Path) -> Iterator[Watched]:
    """One page that the reading tests share; each sets the controls that it needs."""
    page = Watched(browser, report)
    yield page
    page.close()


def test_the_page_loads_in_silence_and_asks_for_nothing(report: Path, open_page: Any) -> None:
    watched = open_page(report)
    page = watched.page
    for layout in ("grpo", "signs"):
        watched.choose("token-layout", layout)
    for colouring in ("discount", "ratio", "weight", "quadrant", "entropy"):
        watched.choose("token-by", colouring)
    page.locator("#theme").click()
    page.locator(".chip").first.click()
    page.locator("#smoothing").select_option("11")
    page.locator("#runs").check()
    page.locator("[data-chart=reward]").hover()
    page.locator("#token-heavy summary").click()
    watched.settle()
    assert watched.complaints == []
    assert watched.requests == [watched.address]
    assert page.locator("[data-chart] .main-svg").count() > 20


def test_a_curve_has_the_points_of_the_store(watched: Watched, runs: Path) -> None:
    page = watched.page
    for chart, metric in (("reward", "reward/mean"), ("q4", "clip/q4")):
        found = {trace["name"]: trace for trace in traces(page, chart, metric)}
        assert sorted(found) == ["grpo", "sa-ah-grpo"]
        for label, trace in found.items():
            seeds = [RunStore(runs / f"{label}-s{seed}").metrics() for seed in range(2)]
            assert trace["x"] == [row["step"] for row in seeds[0]]
            means = [sum(rows[i][metric] for rows in seeds) / 2 for i in range(len(seeds[0]))]
            assert trace["y"] == pytest.approx(means, rel=HALF_A_DIGIT)
    held_out = {t["name"]: t for t in traces(page, "pass1", "evaluation/pass@1")}
    records = [RunStore(runs / f"grpo-s{seed}").evaluations() for seed in range(2)]
    assert held_out["grpo"]["x"] == [record["step"] for record in records[0]]
    values = [[r["metrics"]["pass@1"]["value"] for r in own] for own in records]
    assert held_out["grpo"]["y"] == pytest.approx(np.mean(values, 0), rel=HALF_A_DIGIT)
    # Only the algorithm that discounts has a horizon; the other is left out, not drawn as zero.
    assert [t["name"] for t in traces(page, "horizon", "horizon/effective")] == ["sa-ah-grpo"]


def test_a_chart_can_be_saved_and_offers_no_service(watched: Watched) -> None:
    page = watched.page
    chart = page.locator("[data-chart=reward]")
    chart.hover()
    buttons = chart.locator(".modebar-btn")
    assert buttons.count() == 4  # save, zoom, pan, reset: nothing that sends a chart anywhere
    with page.expect_download() as download:
        buttons.first.click()
    assert download.value.suggested_filename == "reward.svg"
    assert "<svg" in Path(download.value.path()).read_text(encoding="utf-8")


def test_a_label_can_be_hidden(watched: Watched) -> None:
    page = watched.page
    page.locator(".chip", has_text="sa-ah-grpo").click()
    watched.settle()
    assert [t["name"] for t in traces(page, "reward", "reward/mean")] == ["grpo"]
    page.locator(".chip", has_text="sa-ah-grpo").click()
    watched.settle()
    assert len(traces(page, "reward", "reward/mean")) == 2


def test_colouring_follows_the_choice(watched: Watched, runs: Path) -> None:
    watched.pick_run("sa-ah-grpo-s0")
    watched.go_to_step(100)
    rows = RunStore(runs / "sa-ah-grpo-s0").rollouts(100)
    row = next(row for row in rows if row["group"] == 0 and row["advantage"] < 0)
    scales = watched.page.evaluate("view.run.scales")
    card = watched.page.locator(".card.negative").first
    place = 4
    expected = {
        "entropy": row["entropies"][place] / scales["h"],
        "discount": 1 - row["discount"][place],
        "ratio": abs(math.log(row["ratio"][place])) / scales["r"],
        "weight": abs(row["weight"][place]) / scales["w"],
    }
    for colouring, strength in expected.items():
        watched.choose("token-by", colouring)
        alpha = background_alpha(card.locator(".tok").nth(place))
        # --v is written with three decimals
        assert alpha == pytest.approx(min(1, strength), abs=2e-3), colouring
    watched.choose("token-by", "quadrant")
    for token, quadrant in enumerate(row["quadrant"]):
        alpha = background_alpha(card.locator(".tok").nth(token))
        assert alpha == (1 if quadrant else 0)
    legend = watched.page.locator("#token-legend").inner_text()
    assert all(f"Q{quadrant}" in legend for quadrant in range(1, 5))


def test_hover_focus_and_tap_show_the_numbers(watched: Watched, runs: Path) -> None:
    watched.pick_run("sa-ah-grpo-s1")
    watched.go_to_step(200)
    page = watched.page
    rows = RunStore(runs / "sa-ah-grpo-s1").rollouts(200)
    row = next(row for row in rows if row["group"] == 0 and row["advantage"] < 0)
    tokens = page.locator(".card.negative").first.locator(".tok")
    for place in (0, 7, 12):
        tokens.nth(place).hover()
        facts = tip_facts(page)
        columns = {
            "entropy": "entropies",
            "discount": "discount",
            "ratio": "ratio",
            "weight": "weight",
            "GRPO's weight": "grpo_weight",
        }
        for name, column in columns.items():
            expected = row[column][place]
            assert number(facts[name]) == pytest.approx(expected, rel=6e-3, abs=1e-8), name
        assert facts["position"] == f"{place + 1} of {len(row['tokens'])}"
        assert facts["token id"] == str(row["token_ids"][place])
        quadrant = row["quadrant"][place]
        assert facts["quadrant"].startswith(f"Q{quadrant}" if quadrant else "inside")
        assert ("clipped" in facts) == row["clipped"][place]
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    good = next(row for row in rows if row["group"] == 0 and row["advantage"] >= 0)
    page.locator(".prompt").first.focus()
    page.keyboard.press("Tab")
    assert number(tip_facts(page)["entropy"]) == pytest.approx(good["entropies"][0], rel=6e-3)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert number(tip_facts(page)["entropy"]) == pytest.approx(good["entropies"][2], rel=6e-3)
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    tokens.nth(5).click()
    page.mouse.move(2, 2)
    assert number(tip_facts(page)["entropy"]) == pytest.approx(row["entropies"][5], rel=6e-3)


def shown_texts(page: Any, side: str) -> list[str]:
    script = f"""[...document.querySelectorAll('.card.{side} .tokens')].map(
        (node) => node.record.rollout.t.join(""))"""
    texts: list[str] = page.evaluate(script)
    return texts


def test_the_slider_moves_through_the_saved_steps(watched: Watched, runs: Path) -> None:
    watched.pick_run("grpo-s1")
    store = RunStore(runs / "grpo-s1")
    for step in store.rollout_steps():
        watched.go_to_step(step)
        assert watched.page.locator("#token-step-value").inner_text() == str(step)
        group = int(watched.page.locator("#token-group").input_value())
        rows = [row for row in store.rollouts(step) if row["group"] == group]
        for side, negative in (("positive", False), ("negative", True)):
            expected = [row["completion"] for row in rows if (row["advantage"] < 0) == negative]
            assert shown_texts(watched.page, side) == expected


def test_search_finds_what_is_there(watched: Watched, runs: Path) -> None:
    watched.pick_run("grpo-s0")
    watched.go_to_step(100)
    page = watched.page
    rows = RunStore(runs / "grpo-s0").rollouts(100)
    wanted = "wait, "
    page.locator("#token-search").fill(wanted)
    page.wait_for_timeout(300)
    expected = [row["completion"] for row in rows if wanted in row["completion"].lower()]
    found = shown_texts(page, "positive") + shown_texts(page, "negative")
    assert sorted(found) == sorted(expected) != []
    hits = page.locator(".tok.hit").all_text_contents()
    assert "Wait," in hits
    assert len(hits) == 2 * len(expected)  # "Wait," and the token whose space follows it
    counts = page.locator("#token-found").inner_text()
    assert counts.startswith(f"{len(expected)} rollout")
    page.locator("#token-found button").first.click()
    assert page.locator("#token-step-value").inner_text() != "100"
    page.locator("#token-search").fill("no such words")
    page.wait_for_timeout(300)
    assert "Nothing in this step matches" in page.locator("#token-view").inner_text()
    page.locator("#token-search").fill("")
    page.wait_for_timeout(300)


def test_grpo_and_the_algorithm_stand_side_by_side(
    watched: Watched, runs: Path, request: pytest.FixtureRequest
) -> None:
    watched.pick_run("sa-ah-grpo-s0")
    watched.go_to_step(1)
    watched.choose("token-layout", "grpo")
    request.addfinalizer(lambda: watched.choose("token-layout", "signs"))
    rows = RunStore(runs / "sa-ah-grpo-s0").rollouts(1)
    negative = next(row for row in rows if row["group"] == 0 and row["advantage"] < 0)
    scale = watched.page.evaluate("view.run.scales.w")
    panes = watched.page.locator(".card.negative").first.locator(".tokens")
    assert panes.count() == 2
    place = max(range(len(negative["tokens"])), key=lambda i: abs(negative["weight"][i]))
    for pane, column in enumerate(("grpo_weight", "weight")):
        strength = min(1.0, abs(negative[column][place]) / scale)
        alpha = background_alpha(panes.nth(pane).locator(".tok").nth(place))
        assert alpha == pytest.approx(strength, abs=2e-3), column
    # A positive rollout of SA-AH-GRPO is GRPO's: the card says that all of the weight is kept.
    head = watched.page.locator(".card.positive header").first.inner_text()
    assert "100 %" in head


HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<style>body{display:none}</style>&lt;b&gt;&amp; <!-- ]]> ${window.hacked=3} "
    "\u202egnp.exe\u202c \u2028 \x1b[31m \x00 \u200b end"
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    store = RunStore(tmp_path / "runs" / "<img src=x onerror=hacked=4>")
    label = "<script>window.hacked=5</script> \ud800 \u202e & {{ 7*7 }}"
    record = run_record("x", "grpo", 0, 2)
    store.write_run(record | {"label": label, "model": HOSTILE, "config": {HOSTILE: HOSTILE}})
    store.append_metrics(1, {"reward/mean": 0.5, "gradient/norm": 0.1})
    store.append_metrics(2, {"reward/mean": 0.6, "gradient/norm": 0.2})
    tokens = [HOSTILE, " \ud83d", "", "\n", "   ", "long"]
    common = {"step": 2, "reward": 1.0, "prompt": HOSTILE, "kl": 0.1}
    numbers = {"entropies": [0.5] * 6, "weight": [0.1, math.nan, math.inf, 0.0, -0.1, 0.2]}
    endless = ["ab<i>"] * 20_000
    rows = [
        {"group": 0, "rollout": 0, "advantage": 1.0, "completion": "".join(tokens)},
        {"group": 0, "rollout": 1, "advantage": -1.0, "completion": HOSTILE},
        {"group": 0, "rollout": 2, "advantage": -1.0, "completion": "".join(endless)},
    ]
    rows[0] |= {"tokens": tokens, **numbers}
    rows[2] |= {"tokens": endless, "entropies": [0.1] * len(endless)}
    store.write_rollouts(2, [common | row for row in rows])
    return build_report([store.folder], tmp_path / "report.html")


def test_model_text_is_shown_and_runs_nothing(hostile: Path, open_page: Any) -> None:
    watched = open_page(hostile)
    page = watched.page
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.locator("img").count() == 0
    assert page.locator("style").count() <= 2  # the page's own, and plotly's
    first = page.locator(".card.positive .tok").first.text_content()
    assert first.startswith("</script><script>window.hacked = 1</script><img src=x")
    assert "&lt;b&gt;&amp; <!--" in first
    for code in ("U+202E", "U+202C", "U+2028", "U+001B", "U+0000", "U+200B"):
        assert code in first
    assert "\u202e" not in page.locator("#token-view").text_content()
    whitespace = page.locator(".card.positive .tok").nth(4).text_content()
    assert whitespace == "···"
    page.locator(".card.positive .tok").first.hover()
    assert "</script>" in page.locator("#tip .what").text_content()
    page.locator("#token-search").fill("<script>")
    page.wait_for_timeout(300)
    assert page.locator(".tok.hit").count() == 1
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert (
        "<script>window.hacked=5</script>" in page.locator("nav ~ *, .chips").all_text_contents()[1]
    )
    assert watched.complaints == []
    assert watched.requests == [watched.address]


def test_a_completion_of_100000_characters_shows_whole(hostile: Path, open_page: Any) -> None:
    page = open_page(hostile).page
    card = page.locator(".card.negative").nth(1)
    assert card.locator(".tok").count() < 2000  # not all at once
    more = card.locator("button.more")
    for _ in range(20):
        if not more.count():
            break
        more.click()
    assert card.locator(".tokens").text_content() == "ab<i>" * 20_000
    assert card.locator("i").count() == 0


def test_narrow_dark_and_printed(report: Path, open_page: Any) -> None:
    phone = open_page(report, viewport={"width": 360, "height": 740}, color_scheme="dark").page
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    body = "getComputedStyle(document.body).backgroundColor"
    dark = phone.evaluate(body)
    phone.locator("#theme").click()
    light = phone.evaluate(body)
    assert dark == "rgb(19, 22, 27)"
    assert light == "rgb(255, 255, 255)"
    phone.locator("#theme").click()
    phone.emulate_media(media="print")
    assert phone.evaluate(body) == light
    assert phone.locator("nav").is_hidden()
    assert len(phone.pdf(print_background=True)) > 10_000


def test_text_has_contrast_on_every_token_colour(watched: Watched) -> None:
    names = ["entropy", "discount", "up", "down", "high", "low"]
    variables = [*(f"--token-{name}" for name in names), *(f"--q{n}" for n in range(1, 5))]
    page = watched.page
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        ink = page.evaluate("colour('--ink')")
        for variable in variables:
            ratio = contrast(ink, page.evaluate(f"colour('{variable}')"))
            assert ratio >= 4.5, (theme, variable, ratio)
        for text in ("--ink", "--muted", "--accent", "--good", "--bad"):
            for ground in ("--bg", "--panel", "--raised"):
                pair = [page.evaluate(f"colour('{name}')") for name in (text, ground)]
                assert contrast(*pair) >= 4.5, (theme, text, ground)


def contrast(first: str, second: str) -> float:
    """WCAG 2: the ratio of relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published TRL logs are not here")
def test_published_trl_logs_make_a_page(tmp_path: Path, open_page: Any) -> None:
    page_file = build_report([LOGS], tmp_path / "trl.html")
    watched = open_page(page_file)
    page = watched.page
    assert watched.complaints == []
    assert page.locator("#tokens").count() == 0
    charts = page.evaluate("charts.plots.map((chart) => chart.key)")
    assert {"reward", "entropy", "gradient", "length", "q1", "q3"} <= set(charts)
    assert not {"pass1", "horizon", "entropy-sign", "kl", "passk"} & set(charts)
    assert len(traces(page, "q4", "clip/q4")) == 1  # only one of the two logs counts it
    state = json.loads((LOGS / "qwen3-1.7b-base-grpo" / "trainer_state.json").read_text())
    rewards = [(row["step"], row["reward"]) for row in state["log_history"] if "reward" in row]
    trace = next(
        t for t in traces(page, "reward", "reward/mean") if t["name"] == "qwen3-1.7b-base-grpo"
    )
    assert trace["x"] == [step for step, _ in rewards]
    assert trace["y"] == pytest.approx([value for _, value in rewards], rel=HALF_A_DIGIT)


def test_a_run_without_rollouts_or_evaluations(tmp_path: Path, open_page: Any) -> None:
    write_runs(tmp_path / "runs", ("grpo",), seeds=1, steps=3, save_every=100, problems=2)
    folder = tmp_path / "runs" / "grpo-s0"
    for kind in ("rollouts", "evaluations"):
        for path in (folder / kind).iterdir():
            path.unlink()
    watched = open_page(build_report([folder], tmp_path / "report.html"))
    assert watched.complaints == []
    assert watched.page.locator("#tokens").count() == 0
    assert len(watched.page.locator(".sentence").inner_text()) > 10
