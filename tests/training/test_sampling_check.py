"""The sampler's log-probs: recorded for every engine, compared, corrected for, one engine a run."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.objective.ratio import Bounds
from asymgrpo.rollout import Sampling
from asymgrpo.rollout.compute_copy import ComputeCopy, RefreshedEngine
from asymgrpo.rollout.native import NativeEngine
from asymgrpo.training.old_logps import OLD, SAMPLED, OldLogps, difference_sums
from asymgrpo.training.recorded_generate import recorded
from asymgrpo.training.trl import AsymGRPOConfig
from precision_run import build, logged
from small import make_model, make_tokenizer

FILTERS = [{}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}, {"repetition_penalty": 1.3}]


def filtered(logits: list[float], seen: set[int], how: dict[str, float], t: float) -> list[float]:
    """Log-probs after penalty, temperature and filters, as transformers defines them."""
    penalty = how.get("repetition_penalty", 1.0)
    scores = [
        (x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(logits)
    ]
    scores = [x / t for x in scores]
    total = math.log(sum(math.exp(x) for x in scores))
    probabilities = [math.exp(x - total) for x in scores]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = set(order[: int(how.get("top_k", len(order)))])
    if "top_p" in how:
        mass, nucleus = 0.0, set()
        for i in order:
            if mass >= how["top_p"]:
                break
            nucleus.add(i)
            mass += probabilities[i]
        kept &= nucleus
    if "min_p" in how:
        kept &= {i for i in order if probabilities[i] >= how["min_p"] * probabilities[order[0]]}
    mass = math.log(sum(math.exp(scores[i]) for i in kept))
    return [x - mass if i in kept else -math.inf for i, x in enumerate(scores)]


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("how", FILTERS, ids=lambda how: next(iter(how), "none"))
def test_every_engine_gives_the_log_probs_it_drew_from(engine, how, tmp_path):
    """Against loops over the logits of the weights that sampled, which a rate of 0 keeps."""
    trainer = build(tmp_path, engine=engine, temperature=0.8, max_steps=1, learning_rate=0.0, **how)
    trainer.train()
    inputs = trainer._buffered_inputs[0]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    start = inputs["prompt_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, attention_mask=mask).logits.double()
    for row in range(len(ids)):
        for step in range(int(inputs["completion_mask"][row].sum())):
            place = start + step
            seen = set(ids[row, :place][mask[row, :place].bool()].tolist())
            wanted = filtered(logits[row, place - 1].tolist(), seen, how, 0.8)
            found = inputs[SAMPLED][row, step].item()
            assert found == pytest.approx(wanted[ids[row, place]], abs=2e-5)


@pytest.mark.parametrize("how", FILTERS, ids=lambda how: next(iter(how), "none"))
def test_recorded_log_probs_by_hand(how):
    """A log-prob for every token that `generate` draws, against loops over its logits."""
    model = make_model().eval()
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    torch.manual_seed(0)
    with recorded(model) as recorder:
        ids = model.generate(
            prompt, do_sample=True, temperature=0.8, max_new_tokens=6, pad_token_id=0,
            **{"top_k": 0} | how,
        )  # fmt: skip
    assert "_get_logits_processor" not in vars(model)
    answers = []
    for row in ids[:, 3:].tolist():
        answers.append(row[: row.index(1) + 1] if 1 in row else row)
    found = recorder.logps(answers)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.double()
    for row, answer in enumerate(answers):
        for step, token in enumerate(answer):
            seen = set(ids[row, : 3 + step].tolist())
            wanted = filtered(logits[row, 2 + step].tolist(), seen, how, 0.8)[token]
            assert found[row][step] == pytest.approx(wanted, abs=2e-5)


def test_differences_against_loops():
    random = torch.Generator().manual_seed(1)
    mask = torch.rand(5, 7, generator=random) > 0.3
    old = -torch.rand(5, 7, generator=random)
    sampled = old + 0.2 * torch.randn(5, 7, generator=random)
    sampled[0, 0] = math.nan
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, -2.0])
    inputs = {"completion_mask": mask, OLD: old, SAMPLED: sampled, "advantages": advantages}
    bounds = Bounds(positive=(0.9, 1.1), negative=(0.8, 1.3))
    sums, largest = difference_sums(inputs, bounds)
    wanted = [0.0] * 5
    most = 0.0
    for i in range(5):
        low, high = bounds.positive if advantages[i] > 0 else bounds.negative
        for t in range(7):
            if not mask[i, t] or sampled[i, t].isnan():
                continue
            d = old[i, t].item() - sampled[i, t].item()
            w = math.exp(d)
            most = max(most, abs(d))
            for k, value in enumerate((1, abs(d), w - 1 - d, not low <= w <= high, w)):
                wanted[k] += value
    assert sums.tolist() == pytest.approx(wanted, rel=1e-6)
    assert largest.item() == pytest.approx(most, rel=1e-6)


def test_differences_are_logged_each_rollout_batch(tmp_path):
    trainer = build(tmp_path, weights="bfloat16")
    trainer.train()
    rows = logged(trainer)
    named = [{name for name in row if name.startswith("sampling/")} for row in rows]
    every = {
        "sampling/logp_difference/mean",
        "sampling/logp_difference/max",
        "sampling/kl",
        "sampling/beyond_clip",
        "sampling/weight/mean",
    }
    # Two rollout batches of four steps: the comparison belongs to the first step of each.
    assert named == [every, set(), set(), set()] * 2
    assert 0 < rows[0]["sampling/logp_difference/mean"] < 0.05


def test_a_run_resumed_within_a_rollout_batch_logs_what_an_uncut_one_does(tmp_path):
    whole = build(tmp_path / "whole", save_strategy="steps", save_steps=2, max_steps=4)
    whole.train()
    rest = build(tmp_path / "rest", max_steps=4)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    seconds = {"step_time", "time/update", "time/rollout", "tokens_per_second"}
    wanted, found = (
        [{name: value for name, value in row.items() if name not in seconds} for row in rows]
        for rows in (logged(whole)[2:], logged(rest)[-2:])
    )
    assert found == wanted


def test_a_jump_is_a_warning():
    watch = OldLogps(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mean in (0.004, 0.005, 0.004, 0.019):  # rounding varies
            watch._warn_of_a_jump(mean)
    with pytest.warns(UserWarning, match=r"differ from the trainer's by 0\.3 a token, 0\.0045 in"):
        watch._warn_of_a_jump(0.3)
    with pytest.warns(UserWarning, match="one of the two may compute wrongly"):
        OldLogps(None)._warn_of_a_jump(0.6)


def test_a_broken_sampler_is_noticed(tmp_path, monkeypatch):
    """An engine whose logits are off by a factor shows in the first rollout batch."""
    trainer = build(tmp_path, max_steps=1)
    engine = trainer.engine().engine
    forward = engine._forward
    monkeypatch.setattr(engine, "_forward", lambda *inputs: 3 * forward(*inputs))
    with pytest.warns(UserWarning, match="the sampler's log-probs differ"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ("none", 2.0, 0.0)),
        ({"top_p": 0.9}, ("token-truncate", 2.0, 0.0)),
        ({"top_k": 10}, ("token-truncate", 2.0, 0.0)),
        ({"min_p": 0.1}, ("token-truncate", 2.0, 0.0)),
        ({"repetition_penalty": 1.3}, ("token-truncate", 2.0, 0.0)),
        ({"top_p": 0.9, "correction": "none"}, ("none", 2.0, 0.0)),
        ({"engine": "vllm"}, ("sequence-mask", 3.0, 0.0)),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            ("token-truncate", 3.0, 0.0),
        ),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, ("none", 2.0, 0.0)),
        ({"correction": "token-mask", "correction_min": 0.5}, ("token-mask", 2.0, 0.5)),
    ],
)
def test_which_correction_acts(options, wanted, tmp_path):
    config = AsymGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **options)
    sampling = config.objective().sampling
    assert (sampling.correction, sampling.correction_max, sampling.correction_min) == wanted


def test_filtered_tokens_are_weighted_back(tmp_path, capsys):
    """Under top-p the kept tokens are drawn too often, by what was cut off: weights below 1."""
    build(tmp_path)
    assert "filtered" not in capsys.readouterr().out
    build(tmp_path, top_p=0.7, correction="none")
    assert "correction none: the update takes filtered tokens" in capsys.readouterr().out
    trainer = build(tmp_path, top_p=0.7, max_steps=1)
    assert "sampling is filtered" in capsys.readouterr().out
    trainer.train()
    assert logged(trainer)[0]["sampling/weight/mean"] < 0.95
    assert trainer.objective.config.sampling.correction == "token-truncate"


def test_a_correction_without_log_probs_is_refused(tmp_path):
    trainer = build(tmp_path, correction="token-mask")
    with pytest.raises(ValueError, match="needs the sampler's log-probs"):
        trainer._correct_nothing()
    quiet = build(tmp_path, top_p=0.9)
    quiet._correct_nothing()
    assert quiet.objective.config.sampling.correction == "none"


def test_a_copy_follows_the_weights_and_keeps_them_tied():
    model = make_model(tie_word_embeddings=True)
    held = ComputeCopy(model, torch.bfloat16)
    assert held.model.lm_head.weight is held.model.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    held.refresh()
    for ours, theirs in zip(held.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    shared = ComputeCopy(model, torch.float32)
    for ours, theirs in zip(shared.model.parameters(), model.parameters(), strict=True):
        assert ours is theirs


def test_a_copy_leaves_autocast_behind():
    """accelerate casts inside the model's own forward; rollouts in float32 must not be cast."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model = make_model().eval()
    ids = torch.tensor([[5, 6, 7]])
    wanted = model(input_ids=ids).logits
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert not torch.equal(prepared(input_ids=ids).logits, wanted)
    assert torch.equal(ComputeCopy(prepared, torch.float32).model(input_ids=ids).logits, wanted)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_rollouts_on_the_copy_are_those_of_a_narrow_model():
    model, prompts = make_model().double(), [[5, 6, 7]] * 2 + [[8, 9]]
    held = ComputeCopy(model, torch.float32)
    engine = RefreshedEngine(NativeEngine(held.model, make_tokenizer()), held)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found = engine.generate(prompts, Sampling(max_new_tokens=9), [1, 2, 3])
    narrow = NativeEngine(model.float(), make_tokenizer())
    wanted = narrow.generate(prompts, Sampling(max_new_tokens=9), [1, 2, 3])
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-5)


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_run_has_one_engine(engine, tmp_path, monkeypatch):
    from asymgrpo.training import trl

    made = []
    choose = trl.choose_engine

    def counting(*arguments):
        made.append(arguments[0])
        return choose(*arguments)

    monkeypatch.setattr(trl, "choose_engine", counting)
    trainer = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "report_to": "none",
    }
    store = train_run(
        RunSettings(
            steps=2, eval_every=1, eval_problems=4, eval_samples=2, engine=engine, trainer=trainer
        ),
        tmp_path / "run",
    )
    assert made == [engine]
    assert len(store.evaluation_steps()) == 3
    assert store.run()["precision"]["trained"] == "float32"
