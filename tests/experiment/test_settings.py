"""Settings from recipes and flags: what is taken, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asymgrpo.errors import UserError
from asymgrpo.experiment.data import load_reward
from asymgrpo.experiment.plan import plan
from asymgrpo.experiment.run import train_run, trainer_config
from asymgrpo.experiment.settings import (
    RunSettings,
    load_recipe,
    make_settings,
    parse_assignments,
    recipe_files,
)
from asymgrpo.tasks import load_task

RECIPES = recipe_files()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves_without_a_network(name: str, tmp_path: Path) -> None:
    """To the trainer's own configuration, on a machine without a GPU."""
    recipe = load_recipe(name)
    recipe.pop("bf16", None)  # refused without a GPU, by transformers
    if "algorithms" in recipe:
        spec = {key: recipe.pop(key) for key in ("algorithms", "seeds")}
        jobs = plan(spec["algorithms"], spec["seeds"], recipe.pop("sweep", {}), recipe, tmp_path)
        settings = [job.settings for job in jobs]
    else:
        settings = [make_settings(recipe)[0]]
    for entry in settings:
        config = trainer_config(entry, tmp_path)
        assert config.algorithm == entry.algorithm
        assert config.max_steps == entry.steps
        assert config.learning_rate == pytest.approx(float(entry.trainer["learning_rate"]))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_to_expect(name: str) -> None:
    text = RECIPES[name].read_text(encoding="utf-8")
    assert "description:" in text
    assert "expect:" in text


def test_later_layers_win_and_aliases_meet() -> None:
    settings, out = make_settings(
        {"steps": 5, "learning_rate": "1e-6"}, {"max_steps": 7, "output_dir": "there"}, {"seed": 2}
    )
    assert (settings.steps, settings.seed, out) == (7, 2, "there")
    assert settings.trainer["learning_rate"] == 1e-6


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"learning_rat": 1}, "did you mean learning_rate"),
        ({"alhpa": 1}, "did you mean alpha"),
        ({"steps": "ten"}, "steps must be a whole number"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"inclusive": "maybe"}, "inclusive must be true or false"),
        ({"model": 3}, "model must be text"),
    ],
)
def test_mistakes_are_told_by_name(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_settings(layer)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"alpha": -0.5}, "alpha must be at least 0"),
        ({"eps1": -0.1}, "eps1 must be at least 0"),
        ({"num_generations": 3}, "divisible by num_generations"),
        ({"loss_type": "vespo"}, "choose from grpo, dapo, .* set algorithm"),
        ({"alpha": 0.25}, "alpha has no effect with applies_to=none; set applies_to=all"),
        ({"eps_low": 0.1, "clip": "sapo"}, "eps_low has no effect with clip=sapo"),
        ({"beta": -1.0}, "beta must be at least 0"),
        ({"engine": "warp"}, "engine must be one of native, transformers, vllm"),
        ({"scorer": "loose"}, "scorer must be one of packed, padded"),
    ],
)
def test_the_trainer_refuses_in_one_line(
    trainer: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings, _ = make_settings(trainer)
    with pytest.raises(UserError, match=message) as caught:
        trainer_config(settings, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [1\n", "is not YAML"),
        ("1: 2\n", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_a_recipe_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(file)


def test_a_missing_or_binary_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe at"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "binary.yaml")


def test_a_name_is_a_recipe_of_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("algorithm: rloo\n")
    assert load_recipe("demo")["algorithms"] == ["grpo", "ah-grpo", "sa-ah-grpo", "abc-grpo"]
    assert load_recipe("./demo") == {"algorithm": "rloo"}


def test_an_unknown_name_lists_the_recipes() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("demos")
    line = str(caught.value)
    assert line.startswith("no recipe at demos; pass the path of a YAML file, or one of ")
    assert all(name in line for name in RECIPES)
    assert len(RECIPES) == 12


def test_assignments_are_yaml() -> None:
    assert parse_assignments(["a=1", "b=[1, 2]", "c="]) == {"a": 1, "b": [1, 2], "c": None}
    with pytest.raises(UserError, match="key=value"):
        parse_assignments(["alpha"])


def test_settings_survive_json() -> None:
    settings = RunSettings(reward=("task", "mine:score"), trainer={"alpha": 0.25})
    assert RunSettings.from_dict(settings.to_dict()) == settings


def test_a_sweep_runs_equal_objectives_once(tmp_path: Path) -> None:
    """GRPO has no alpha; AH-GRPO at alpha 0 is GRPO."""
    jobs = plan(["grpo", "ah-grpo", "sa-ah-grpo"], 2, {"alpha": ["0", "0.25", "0.5"]}, {}, tmp_path)
    labels = [job.label for job in jobs if job.settings.seed == 0]
    assert labels == [
        "grpo",
        "ah-grpo alpha=0.25",
        "ah-grpo alpha=0.5",
        "sa-ah-grpo alpha=0.25",
        "sa-ah-grpo alpha=0.5",
    ]
    assert len(jobs) == 10
    assert len({job.folder for job in jobs}) == 10


def test_a_setting_that_no_algorithm_uses_is_refused(tmp_path: Path) -> None:
    for sweep, shared in (({"alpha": ["0.25"]}, {}), ({}, {"alpha": 0.25})):
        with pytest.raises(UserError, match="alpha has no effect under any of grpo, abc-grpo"):
            plan(["grpo", "abc-grpo"], 1, sweep, shared, tmp_path)
        plan(["grpo", "sa-ah-grpo"], 1, sweep, shared, tmp_path)


def test_a_label_cannot_leave_the_folder(tmp_path: Path) -> None:
    (job,) = plan(["grpo"], 1, {"applies_to": ["none"]}, {}, tmp_path)
    assert job.folder.parent == tmp_path
    with pytest.raises(UserError, match="one or more unlike seeds"):
        plan(["grpo"], [1, 1], {}, {}, tmp_path)


def test_a_task_and_a_reward_in_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from asymgrpo.tasks import Grade\n"
        "class Words:\n"
        "    name = 'words'\n"
        "    def examples(self, split): return [{'word': w} for w in ('tin', 'can', 'pot')]\n"
        "    def prompt(self, example): return f\"Say {example['word']}.\"\n"
        "    def grade(self, completion, example): return Grade(0.0, completion, 'wrong')\n"
        "def length(completions, **_): return [1.0 + len(c) for c in completions]\n",
        encoding="utf-8",
    )
    trainer = {"per_device_train_batch_size": 8, "num_generations": 4, "report_to": "none"}
    settings = RunSettings(
        task=f"{file}:Words",
        reward=(f"{file}:length",),
        steps=1,
        trainer=trainer | {"max_completion_length": 8},
    )
    store = train_run(settings, tmp_path / "run")
    assert store.metrics()[0]["reward/mean"] >= 1
    with pytest.raises(UserError, match=r"own\.py has no width; it has .*length"):
        load_reward(f"{file}:width", load_task("arithmetic"), 1.0)
