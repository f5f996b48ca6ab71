"""The built-in model: it loads without a network, fits the package, and leaves room to learn."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from asymgrpo.models import load_policy
from asymgrpo.models.model_sources import BUILT_IN
from asymgrpo.tasks.arithmetic import ArithmeticTask

FOLDER = BUILT_IN["tiny"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_tiny.py"


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrain_tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loads_with_plain_from_pretrained_and_no_network():
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "ids = tokenizer('Mia has 47 coins.')['input_ids'];"
        "print(type(model).__name__, model.dtype, tokenizer.convert_ids_to_tokens(ids))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = "Qwen2ForCausalLM torch.float32 ['Mia ', 'has ', '4', '7', ' coins', '.']"
    assert run.stdout.strip() == expected


def test_folder_is_at_most_10_mb():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 10_000_000
    assert {file.suffix for file in FOLDER.iterdir()} == {".json", ".safetensors", ".md"}


def test_pass_at_1_leaves_room_and_the_reliable_way_is_known(tiny, script):
    torch.manual_seed(0)
    measured = script.measure(tiny.model, tiny.tokenizer, problems=256, samples=1)
    assert 0.30 <= measured["pass@1"] <= 0.65
    ways = measured["ways"]
    assert ways["worked"]["accuracy"] >= 0.95
    assert ways["hasty"]["accuracy"] <= 0.75
    assert ways["guessed"]["accuracy"] <= 0.25
    assert all(0.2 <= ways[way]["share"] <= 0.5 for way in ("worked", "hasty", "guessed"))


def test_the_card_states_the_figures_that_were_measured():
    measured = json.loads((FOLDER / "pretraining.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert f"{measured['pass@1']:.3f}" in card
    assert f"{measured['training']['steps']:,}" in card
    for way in ("worked", "hasty", "guessed"):
        assert f"{measured['ways'][way]['accuracy']:.3f}" in card
        assert f"{measured['ways'][way]['share']:.2f}" in card


@pytest.mark.parametrize(
    "text", ["Zebra é 漢字 12.5%\n\tok", "this is  47  + 9", " Maybe the answer is 120.", "\x00~"]
)
def test_any_text_survives_the_tokenizer(tiny, text):
    ids = tiny.tokenizer(text)["input_ids"]
    assert tiny.tokenizer.decode(ids) == text


def test_tokenizer_takes_digits_singly_and_words_whole(tiny):
    tokenizer = tiny.tokenizer
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for row in ArithmeticTask().examples("test")[:200]:
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(row["question"])["input_ids"])
        assert all(len(piece.strip()) == 1 for piece in pieces if any(map(str.isdigit, piece)))
        assert not any(len(piece) == 1 and piece.isalpha() for piece in pieces)


def test_the_script_builds_the_tokenizer_of_the_folder(script, tiny):
    built = script.build_tokenizer()
    assert built.get_vocab() == tiny.tokenizer.get_vocab()


def test_the_script_trains_on_training_rows_only_and_lowers_the_loss(script, tiny):
    corpus = script.encode_rows((0, 256))
    for tokens, length in zip(corpus.tokens, corpus.lengths, strict=True):
        assert tokens[length - 1] == tiny.tokenizer.eos_token_id
        assert (tokens[length:] == tiny.tokenizer.pad_token_id).all()
    test_questions = {row["question"] for row in ArithmeticTask().examples("test")}
    questions = {
        tiny.tokenizer.decode(tokens[:length])
        for tokens, length in zip(corpus.tokens, corpus.prompt_lengths, strict=True)
    }
    assert not questions & test_questions
    torch.manual_seed(0)
    model = script.build_model(tiny.tokenizer, layers=1)
    arguments = Namespace(
        lr=2e-3, steps=12, max_seconds=60.0, batch=16, seed=0, log_every=100, rows=256
    )
    assert script.train(model, corpus, arguments)["loss"] < 5.0  # log(323) = 5.8 at the start
