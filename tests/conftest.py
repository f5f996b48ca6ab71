"""Shared by all tests: the data folder, a small tokenizer and model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from small import make_model, make_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Where GSM8K and the other sets lie; tests that need them skip where they are absent."""
    places = [os.environ.get("ASYMGRPO_DATA"), ROOT.parent / "shared/data", ROOT / "shared/data"]
    for place in places:
        if place and Path(place).is_dir():
            return Path(place)
    pytest.skip("the data folder is absent; set ASYMGRPO_DATA to it")


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def model() -> Any:
    return make_model()
