"""The option `decoder` reaches the native engine, from the command line and from the trainer."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.rollout import NativeEngine, choose_engine, select_engine


@pytest.mark.parametrize("decoder", ["fused", "graph", "eager"])
def test_the_option_reaches_the_engine(decoder, tiny):
    engine, reason = choose_engine("native", tiny("qwen2"), None, decoder)
    assert reason is None
    assert engine.decoder == decoder
    assert choose_engine("native", tiny("qwen2"), None)[0].decoder == "fused"


def test_an_unknown_decoder_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="choose from fused, graph, eager"):
        NativeEngine(tiny("qwen2"), None, decoder="grahp")
    with pytest.raises(UserError, match="decoder must be one of fused, graph, eager"):
        run_command(tmp_path, "grahp")


def run_command(folder, decoder):
    words = ["train", "--steps", "1", "--out", str(folder / "run"), "--set", f"decoder={decoder}"]
    small = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "steps_per_generation": 1,
        "max_completion_length": 8,
        "report_to": "none",
    }
    for key, value in small.items():
        words += ["--set", f"{key}={value}"]
    return CliRunner().invoke(cli.app, words, catch_exceptions=False)


def test_the_option_reaches_the_engine_from_the_command_line(tmp_path, monkeypatch):
    made = []

    class Noted(NativeEngine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(select_engine, "NativeEngine", Noted)
    assert run_command(tmp_path, "graph").exit_code == 0
    # The first engine is the one that is compared with the model; the second samples.
    assert made[-1].decoder == "graph"


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_all_decoders_give_the_same_rollouts(adapter, tiny, lora, ragged):
    from asymgrpo.rollout import Sampling

    model = tiny("qwen2", "cuda")
    if adapter:
        model = lora(model).eval()
    found = {}
    for decoder in ("eager", "graph", "fused"):
        engine = NativeEngine(model, None, decoder=decoder)
        rollouts = engine.generate(ragged(12), Sampling(max_new_tokens=20), range(12))
        found[decoder] = [rollout.token_ids for rollout in rollouts]
        graphs = engine._graph_decoder()
        assert (graphs is None) == (decoder == "eager")
        assert graphs is None or (graphs._plan is not None) == (decoder == "fused")
    assert found["fused"] == found["graph"] == found["eager"]
