"""The identity of a run: what differs in any one setting is never pooled or taken for another."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.compare import load_runs
from asymgrpo.experiment.identity import CONDITIONAL, NOT_IDENTITY, labels
from asymgrpo.experiment.plan import parse_seeds, parse_sweeps, plan, unrun_record
from asymgrpo.experiment.settings import RunSettings, make_settings, trainer_defaults
from asymgrpo.experiment.store import RunStore
from asymgrpo.objective.presets import OVERRIDES
from asymgrpo.report.sources import find_sources

OWN = [f.name for f in dataclasses.fields(RunSettings) if f.name != "trainer"]
TRAINER = sorted(set(trainer_defaults()) - set(OWN) - set(OVERRIDES))
ACTING_UNDER = {
    **dict.fromkeys(("alpha", "normalize", "inclusive"), "sa-ah-grpo"),
    **dict.fromkeys(("eps1", "eps2", "eps3", "eps4"), "abc-grpo"),
    "delta": "dual-clip-grpo",
    **dict.fromkeys(("tau_positive", "tau_negative"), "sapo"),
}


def another(value: Any) -> Any:
    """A value of the same kind that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | tuple):
        return [*value, "more"]
    return f"{value}-other"


def write(folder: Path, record: dict[str, Any], seed: int) -> Path:
    record = deepcopy(record) | {"seed": seed, "status": "finished"}
    record["settings"]["seed"] = seed
    RunStore(folder).write_run(json.loads(json.dumps(record, default=str)))
    return folder


def pooled(one: dict[str, Any], other: dict[str, Any], tmp_path: Path) -> bool:
    """Whether a report and a comparison take two runs for seeds of one variant."""
    folders = [write(tmp_path / "a", one, 0), write(tmp_path / "b", other, 1)]
    shown = {source.label for source in find_sources(folders)}
    assert shown == {run.label for run in load_runs(folders)}
    return len(shown) == 1


def base(algorithm: str = "grpo", **trainer: Any) -> dict[str, Any]:
    return unrun_record(RunSettings(algorithm=algorithm, model="some/model", trainer=trainer))


@pytest.mark.parametrize("name", [*OWN, *TRAINER])
@pytest.mark.parametrize("where", ["given", "given by one", "resolved"])
def test_runs_that_differ_in_one_setting_are_never_pooled(
    name: str, where: str, tmp_path: Path
) -> None:
    one = base()
    value = one["settings"].get(name, trainer_defaults().get(name))
    if name == "algorithm":
        other = base("dapo")
    else:
        other = deepcopy(one)
        if where == "resolved":
            one["resolved"] = {name: value, "temperature": 1.0}
            other["resolved"] = one["resolved"] | {name: another(value)}
        if name in OWN:
            other["settings"][name] = another(value)
        elif where != "resolved":
            other["settings"]["trainer"][name] = another(value)
            if where == "given":
                one["settings"]["trainer"][name] = another(another(value))
    assert pooled(one, other, tmp_path) is (name in NOT_IDENTITY)


@pytest.mark.parametrize("name", OVERRIDES)
def test_runs_that_differ_in_a_piece_of_the_objective_are_never_pooled(
    name: str, tmp_path: Path
) -> None:
    needed: dict[str, Any] = {}
    if name in ("estimator", "bias_correction"):
        needed = {"beta": 0.1}
    elif name in ("correction_max", "correction_min"):
        needed = {"correction": "token-mask"}
    one = base(ACTING_UNDER.get(name, "grpo"), **needed)
    other = deepcopy(one)
    group = OVERRIDES[name]
    piece = other["objective"][group] if group else other["objective"]
    piece[name] = another(piece[name])
    other["settings"]["trainer"][name] = piece[name]
    assert not pooled(one, other, tmp_path)


def test_every_piece_that_may_be_idle_is_tested_where_it_acts() -> None:
    with_others = {"estimator", "bias_correction", "correction_max", "correction_min"}
    assert {*ACTING_UNDER, *with_others, "eps_low", "eps_high"} == CONDITIONAL


def test_where_the_best_checkpoint_is_kept_saving_counts(tmp_path: Path) -> None:
    one, other = (base(load_best_model_at_end=True, save_steps=n) for n in (5, 10))
    assert not pooled(one, other, tmp_path)


def test_seeds_of_one_variant_are_pooled_and_versions_are_not_settings(tmp_path: Path) -> None:
    one, other = base(learning_rate=1e-4), base(learning_rate=1e-4, save_steps=7)
    other |= {"versions": {"torch": "9"}, "device": "cuda:0", "created": "later"}
    assert pooled(one, other, tmp_path)


def test_a_record_from_before_a_setting_existed_stays_with_its_default(tmp_path: Path) -> None:
    old = base()
    del old["settings"]["system_prompt"]
    assert pooled(old, base(), tmp_path)
    assert not pooled(old | {"resolved": None}, base(learning_rate=1e-6), tmp_path)


def test_labels_name_what_differs() -> None:
    runs = [base(learning_rate=rate) for rate in (1e-4, 2e-4)]
    assert labels(runs) == ["grpo lr=1e-4", "grpo lr=2e-4"]
    assert labels(runs[:1]) == ["grpo"]
    assert labels([base("sa-ah-grpo", alpha=0.25)]) == ["sa-ah-grpo alpha=0.25"]
    mixed = [base("grpo", learning_rate=1e-4), base("dapo", learning_rate=2e-4)]
    assert labels(mixed) == ["grpo lr=1e-4", "dapo lr=2e-4"]
    prompts = [base() for _ in range(3)]
    for record, prompt in zip(prompts, ("a" * 50 + "1", "a" * 50 + "2", "a\nb"), strict=True):
        record["settings"]["prompt"] = prompt
    found = labels(prompts)
    assert len(set(found)) == 3
    assert found[2] == "grpo prompt=a b"


def test_a_trl_folder_is_not_pooled_with_ours_or_with_another_setting(tmp_path: Path) -> None:
    def state(name: str, rate: float, **fields: Any) -> Path:
        history = [{"step": 1, "reward": 0.5, "learning_rate": rate}]
        text = {"global_step": 5, "max_steps": 5, "log_history": history} | fields
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps(text))
        return tmp_path / name

    ours = write(tmp_path / "ours", base(), 0)
    same = [state("grpo-seed0", 1e-6), state("grpo-seed1", 1e-6, global_step=3)]
    others = [state("grpo-seed2", 2e-6), state("grpo-seed3", 1e-6, max_steps=9)]
    found = [source.label for source in find_sources([ours, *same, *others])]
    assert found[1] == found[2]
    assert len(set(found)) == 4


# Plans


SHARED = {"model": "tiny", "task": "arithmetic", "steps": 2}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("engine=native,transformers", ["grpo engine=native", "grpo engine=transformers"]),
        ("task=arithmetic,gsm8k", ["grpo task=arithmetic", "grpo task=gsm8k"]),
        ("lora=8,16", ["grpo lora=8", "grpo lora=16"]),
        ("learning_rate=1e-4,2e-4", ["grpo lr=1e-4", "grpo lr=2e-4"]),
        ("scorer=packed,padded", ["grpo scorer=packed", "grpo scorer=padded"]),
        ("max_steps=2,4", ["grpo steps=2", "grpo steps=4"]),
        ("bf16=true,false", ["grpo bf16=true", "grpo bf16=false"]),
    ],
)
def test_any_field_is_swept(words: str, wanted: list[str], tmp_path: Path) -> None:
    jobs = plan(["grpo"], 2, parse_sweeps([words]), SHARED, tmp_path)
    assert [job.label for job in jobs if job.settings.seed == 0] == wanted
    assert len({job.folder for job in jobs}) == len(jobs) == 4
    again = plan(["grpo"], 1, parse_sweeps([words.rpartition(",")[0]]), SHARED, tmp_path)
    assert again[0].folder == jobs[0].folder  # a longer sweep finds what a shorter one ran


def test_a_recipe_sweeps_as_the_command_line_does(tmp_path: Path) -> None:
    asked = plan(["grpo"], 1, parse_sweeps(["lora=4,8"]), SHARED, tmp_path)
    assert plan(["grpo"], 1, {"lora": [4, 8]}, SHARED, tmp_path) == asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("seed=3,4", "use --seeds"),
        ("algorithm=grpo,dapo", "use --algorithms"),
        ("save_steps=1,2", "would compare equal runs"),
        ("report_to=none,tensorboard", "would compare equal runs"),
        ("alhpa=1,2", "did you mean alpha"),
        ("lora=few,many", "lora must be a whole number"),
        ("alpha=0.1,0.2", "alpha has no effect under any of grpo"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        plan(["grpo"], 1, parse_sweeps([words]), SHARED, tmp_path)
    key, _, values = words.partition("=")
    with pytest.raises(UserError, match=message):
        plan(["grpo"], 1, {key: values.split(",")}, SHARED, tmp_path)


def test_what_one_algorithm_alone_takes_is_given_to_that_one(tmp_path: Path) -> None:
    jobs = plan(["grpo", "sa-ah-grpo"], 1, {}, SHARED | {"alpha": 0.25}, tmp_path)
    assert [job.label for job in jobs] == ["grpo", "sa-ah-grpo alpha=0.25"]


def test_a_seed_among_shared_settings_is_refused_and_seeds_may_be_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use --seeds"):
        plan(["grpo"], 1, {}, SHARED | {"seed": 3}, tmp_path)
    jobs = plan(["grpo"], parse_seeds("3,4"), {}, SHARED, tmp_path)
    assert [job.settings.seed for job in jobs] == [3, 4]


def test_a_folder_with_another_run_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A finished run of other settings must not be taken for this one's result."""
    (job,) = plan(["grpo"], 1, {}, SHARED | {"learning_rate": 1e-4}, tmp_path)
    write(job.folder, unrun_record(job.settings), 0)
    assert plan(["grpo"], 1, {}, SHARED | {"learning_rate": 1e-4, "save_steps": 3}, tmp_path)
    with pytest.raises(UserError, match=r"holds another run \(learning_rate 1e-4, not 2e-4\)"):
        plan(["grpo"], 1, {}, SHARED | {"learning_rate": 2e-4}, tmp_path)


def test_a_dry_run_prints_a_line_for_each_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--algorithms", "grpo,sa-ah-grpo", "--seeds", "2", "--dry-run"]
    result = CliRunner().invoke(
        cli.app, [*words, "--sweep", "lora=4,8"], catch_exceptions=False, color=False
    )
    lines = [line.split("  ") for line in result.output.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["grpo lora=4", "0", "runs/compare/grpo-lora=4-seed0"]
    assert rows[-1] == ["sa-ah-grpo lora=8", "1", "runs/compare/sa-ah-grpo-lora=8-seed1"]
    assert len(rows) == 8
    assert not list(tmp_path.iterdir())


def test_default_folders_of_different_runs_differ() -> None:
    layers: list[dict[str, Any]] = [
        {}, {"lora": 8}, {"learning_rate": 1e-5}, {"prompt": "Q: {question}"},
        {"steps": 5, "lora": 8, "learning_rate": 1e-5}, {"steps": 5, "lora": 8, "beta": 0.1},
    ]  # fmt: skip
    names = [make_settings(layer)[0].default_name for layer in layers]
    assert names[:2] == ["grpo-tiny-arithmetic-seed0", "grpo-tiny-arithmetic-lora=8-seed0"]
    assert len(set(names)) == len(names)


def test_the_exceptions_are_settings_that_exist() -> None:
    assert set(NOT_IDENTITY) <= {*OWN, *trainer_defaults(), "out"}
