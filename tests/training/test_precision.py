"""In which types a run trains, and that nothing is lost or clipped by rounding alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from asymgrpo.errors import UserError
from asymgrpo.training.guard import FiniteGuard
from asymgrpo.training.master_weights import MasterWeights
from asymgrpo.training.precision import decide_precision
from precision_run import build, logged

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# weights, bf16, fp16, LoRA, engine, scorer
CELLS = [
    ("float32", False, False, False, "native", "packed"),
    ("float32", True, False, False, "native", "packed"),
    ("float32", True, False, True, "native", "padded"),
    ("float32", True, False, False, "transformers", "padded"),
    ("bfloat16", True, False, False, "native", "packed"),
    ("bfloat16", False, False, False, "native", "padded"),
    ("bfloat16", True, False, True, "native", "packed"),
    ("float16", True, False, False, "native", "packed"),
    pytest.param("float16", False, True, False, "native", "packed", marks=pytest.mark.gpu),
    pytest.param("float16", False, True, True, "native", "packed", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weights", "bf16", "fp16", "lora", "engine", "scorer"), CELLS)
def test_ratios_of_unchanged_weights_are_exactly_1(
    weights, bf16, fp16, lora, engine, scorer, device, tmp_path
):
    """Four mini-batches, two passes over each rollout batch, a learning rate of 0."""
    trainer = build(
        tmp_path,
        weights=weights,
        lora=lora,
        device=device,
        engine=engine,
        scorer=scorer,
        bf16=bf16,
        fp16=fp16,
        learning_rate=0.0,
        num_iterations=2,
    )
    trainer.train()
    rows = logged(trainer)
    assert trainer.args.engine == engine
    assert scorer == "padded" or trainer._packs(trainer.model)
    assert [row["ratio/max"] for row in rows] == [1.0] * 8
    assert [row["ratio/mean"] for row in rows] == [1.0] * 8
    assert all(row[f"clip/q{n}"] == 0 for row in rows for n in (1, 2, 3, 4))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_ratios_leave_1_with_the_first_update(accumulation, tmp_path):
    """Also where rollout batches and optimiser steps are out of step."""
    trainer = build(
        tmp_path,
        weights="bfloat16",
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        max_steps=6,
    )
    changed: list[bool] = []
    compute = trainer._compute_loss
    sampled_at = 0

    def spy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        nonlocal sampled_at
        if trainer._step % 4 == 0:
            sampled_at = trainer.state.global_step
        loss = compute(model, inputs)
        changed.append(trainer.state.global_step > sampled_at)
        return loss

    trainer._compute_loss = spy
    ratios: list[float] = []
    record = trainer._record_metrics

    def noting(batch: Any, out: Any) -> None:
        ratios.append(out.metrics["ratio/max"])
        record(batch, out)

    trainer._record_metrics = noting
    trainer.train()
    assert len(ratios) == len(changed) >= 6
    for ratio, has_changed in zip(ratios, changed, strict=True):
        assert (ratio == 1.0) is not has_changed


def test_old_log_probs_are_those_of_the_weights_that_sampled(tmp_path):
    """Against a forward pass of a copy of those weights, in float32."""
    trainer = build(tmp_path, learning_rate=1e-2, max_steps=4)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    ends = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert any(not torch.equal(start[name], ends[name]) for name in start)
    trainer.model.load_state_dict(start, strict=False)
    for inputs in trainer._buffered_inputs:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits.double()
        logps = logits.log_softmax(-1)[:, -width - 1 : -1]
        logps = logps.gather(2, inputs["completion_ids"][..., None])[..., 0]
        kept = inputs["completion_mask"].bool()
        found = inputs["old_per_token_logps"].double()
        torch.testing.assert_close(found[kept], logps[kept], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("trained", "frozen", "bf16", "fp16", "wanted"),
    [
        ("float32", None, False, False, "weights float32"),
        (
            *("float32", None, True, False),
            "weights float32, bfloat16 autocast, rollouts on a bfloat16 copy",
        ),
        ("bfloat16", None, True, False, "weights bfloat16 with float32 masters"),
        ("bfloat16", None, False, False, "weights bfloat16 with float32 masters"),
        (
            *("bfloat16", None, False, True),
            "weights float32, float16 autocast, rollouts on a float16 copy",
        ),
        (
            *("float16", None, True, False),
            "weights float32, bfloat16 autocast, rollouts on a bfloat16 copy",
        ),
        *(
            (adapter, base, True, False, f"frozen weights bfloat16, trained weights {held}")
            for base in ("float32", "bfloat16", "float16")
            for adapter, held in (
                ("float32", "float32"),
                ("bfloat16", "bfloat16 with float32 masters"),
            )
        ),
        ("float32", "float32", False, False, "frozen weights float32, trained weights float32"),
        ("float32", "bfloat16", False, True, "frozen weights float16, trained weights float32"),
    ],
)
def test_the_policy(trained, frozen, bf16, fp16, wanted):
    def weights(name: str | None) -> list[torch.Tensor]:
        return [] if name is None else [torch.ones(2, dtype=getattr(torch, name))]

    assert str(decide_precision(weights(trained), weights(frozen), bf16=bf16, fp16=fp16)) == wanted


@pytest.mark.parametrize("frozen", [[], [torch.ones(9, dtype=torch.float16)]])
def test_float16_alone_is_refused(frozen):
    with pytest.raises(UserError, match="set bf16=true or fp16=true"):
        decide_precision([torch.ones(2, dtype=torch.float16)], frozen)


def adam(weights: list[float], gradients: list[list[float]], rate: float) -> list[float]:
    """Adam in float64, by the paper, without weight decay."""
    first, second = [0.0] * len(weights), [0.0] * len(weights)
    for t, gradient in enumerate(gradients, 1):
        for i, g in enumerate(gradient):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            step = first[i] / (1 - 0.9**t) / (math.sqrt(second[i] / (1 - 0.999**t)) + 1e-8)
            weights[i] -= rate * step
    return weights


def test_masters_follow_adam_where_bfloat16_stands_still():
    random = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=random).bfloat16()
    gradients = torch.randn(200, 64, generator=random).bfloat16()
    gradients += 0.5  # so that updates add up
    wanted = adam(start.double().tolist(), gradients.double().tolist(), 1e-6)
    lost, kept = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [torch.optim.AdamW([p], lr=1e-6, weight_decay=0.0) for p in (lost, kept)]
    masters = MasterWeights(optimizers[1])
    for gradient in gradients:
        lost.grad, kept.grad = gradient.clone(), gradient.float()
        for optimizer in optimizers:
            optimizer.step()
    found = masters.of(kept).detach().double()
    # 200 sums in float32 of updates of 1e-6 to weights of about 1
    assert (found - torch.tensor(wanted)).abs().max() < 200 * 2**-24 * 4
    assert torch.equal(kept.detach(), found.float().bfloat16())
    assert (lost == start).float().mean() > 0.9
    moved = (found - start.double()).abs()
    assert moved.min() > 1e-6


def test_gradients_add_up_in_float32():
    """256 gradients of which bfloat16 would lose all after the first few."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    MasterWeights(torch.optim.SGD([weight], lr=1.0))
    for share in [1.0] + [2.0**-10] * 256:
        (weight * torch.tensor(share, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 1.25


@pytest.mark.parametrize("device", DEVICES)
def test_full_fine_tuning_at_1e_6_loses_no_update(device, tmp_path):
    trainer = build(
        tmp_path, weights="bfloat16", device=device, bf16=True, learning_rate=1e-6, max_steps=4
    )
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    masters = [trainer._masters.of(p).detach() for p in trainer.model.parameters()]
    pairs = list(zip(masters, start, strict=True))
    changed = torch.cat([(m != s.float()).flatten() for m, s in pairs])
    rounded = torch.cat([(m.bfloat16() != s).flatten() for m, s in pairs])
    # Rows of the embedding that no batch uses have no gradient.
    assert changed.float().mean() > 0.9
    assert rounded.float().mean() < 0.1
    for parameter, master in zip(trainer.model.parameters(), masters, strict=True):
        assert torch.equal(parameter.detach(), master.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_resuming_with_masters_is_exact(device, tmp_path):
    options = {"weights": "bfloat16", "device": device, "bf16": True, "learning_rate": 1e-5}
    whole = build(tmp_path / "whole", **options)
    whole.train()
    first = build(tmp_path / "cut", save_strategy="steps", save_steps=3, **options)
    first.args.max_steps = 3
    first.train()
    second = build(tmp_path / "cut", **options)
    second.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-3"))
    assert second.state.global_step == 8
    # A GPU sums gradients in no fixed order; masters lost to rounding would be off by 1e-3.
    bound = 0.0 if device == "cpu" else 8 * 2 * 1e-5
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        difference = (whole._masters.of(one) - second._masters.of(other)).abs().max()
        assert difference <= bound
        assert torch.equal(other, second._masters.of(other).bfloat16())


def test_a_saved_model_holds_the_masters(tmp_path):
    trainer = build(tmp_path / "run", weights="bfloat16", learning_rate=1e-5)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final/model.safetensors")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(saved[name], trainer._masters.of(parameter).detach())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name])


def test_masters_need_a_fresh_optimizer():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(UserError, match="has not taken a step yet"):
        MasterWeights(optimizer)


class _Scaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


@pytest.mark.parametrize(("scale", "counts"), [(65536.0, False), (1.0, True), (None, True)])
def test_overflow_that_the_loss_scaler_expects_is_no_bad_step(scale, counts, tmp_path):
    trainer = build(tmp_path)
    trainer.accelerator.scaler = None if scale is None else _Scaler(scale)
    guard = FiniteGuard(trainer)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    for _ in range(2):
        guard.on_pre_optimizer_step(
            trainer.args, trainer.state, trainer.control, model=trainer.model
        )
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, math.inf)
    assert bool(guard.bad_steps) is counts


def test_float16_needs_a_gpu(tmp_path, monkeypatch, capsys):
    from asymgrpo import cli

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["asymgrpo", "train", "--set", "fp16=true", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "fp16 needs a GPU" in capsys.readouterr().err
    assert not Path(out).exists()
