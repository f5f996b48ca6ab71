"""The card names the base model, and the algorithm with its paper."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asymgrpo import ALGORITHMS, algorithm
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import make_settings
from asymgrpo.training.model_card import model_card


@pytest.mark.parametrize("lora", [0, 2])
def test_a_runs_cards(lora: int, tmp_path: Path) -> None:
    settings, _ = make_settings({
        "algorithm": "abc-grpo", "eps3": 0.5, "steps": 1, "lora": lora, "save_steps": 1,
        "per_device_train_batch_size": 8, "num_generations": 4, "steps_per_generation": 2,
        "max_completion_length": 8, "report_to": "none",
    })  # fmt: skip
    train_run(settings, tmp_path / "mine")
    for place in ("README.md", "final/README.md"):
        text = (tmp_path / "mine" / place).read_text()
        assert "A fine-tuned version of `tiny`, trained with ABC-GRPO" in text
        assert "https://arxiv.org/abs/2601.03895" in text
        assert "eps3=0.5" in text
        assert "None" not in text
        assert str(tmp_path) not in text
        header = yaml.safe_load(text.split("---")[1])
        assert {"trl", "grpo", "asymgrpo", "abc-grpo", "arxiv:2601.03895"} <= {*header["tags"]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_its_paper(name: str) -> None:
    text = model_card("x", "Qwen/Qwen3-4B-Base", name, algorithm(name), [])
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "Qwen/Qwen3-4B-Base"
    assert f"trained with {name.upper()} (" in text
    for paper in ALGORITHMS[name].paper.split(", "):
        assert f"[arXiv {paper}](https://arxiv.org/abs/{paper})" in text
