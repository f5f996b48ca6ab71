"""The objective alone: loss and gradient on [64, 1024] tokens, beside TRL's own code.

    python benchmarks/objective.py [--device cpu|cuda] [--rounds 40] [--threads 1]

The yardstick is `GRPOTrainer._compute_loss` itself, run on a stand-in for the trainer whose model
hands out the given log-probabilities and entropies. TRL logs its metrics inside that method: the
column with metrics runs it whole, the column without stops it where the logging begins and takes
the loss from its frame. Rounds are interleaved and ratios taken within a round, so that a busy
machine slows both sides alike; medians over rounds are printed.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

from asymgrpo import ALGORITHMS, Objective, TokenBatch, algorithm

ROLLOUTS, TOKENS, VOCAB = 64, 1024, 151_936
LIMIT = 1.5
Step = Callable[[], None]
Key = tuple[str, bool]  # a line of the table, and whether with metrics


def make_batch(device: str) -> TokenBatch:
    """Off-policy rollouts of ragged length, half of them failed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (ROLLOUTS, 1), generator=generator)
    logps = -normal(ROLLOUTS, TOKENS).abs()
    return TokenBatch(
        logps=logps.to(device).requires_grad_(),
        old_logps=(logps + 0.1 * normal(ROLLOUTS, TOKENS)).to(device),
        mask=(torch.arange(TOKENS) < lengths).long().to(device),
        advantages=normal(ROLLOUTS).to(device),
        entropies=normal(ROLLOUTS, TOKENS).abs().to(device),
        vocab_size=VOCAB,
    )


class LoggingBegins(Exception):
    """Raised in place of TRL's first access to its metrics, which follows the loss."""


class Unlogged:
    def __getitem__(self, mode: str) -> None:
        raise LoggingBegins


def trl_loss(batch: TokenBatch, metrics: bool) -> Callable[[], torch.Tensor]:
    """TRL's GRPO on the batch: its method, with only what it reads of the trainer around it."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logps, batch.entropies, None),
        _metrics={"train": defaultdict(list)} if metrics else Unlogged(),
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=0.2,
        epsilon_low=0.2,
        importance_sampling_level="token",
        loss_type="grpo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    prompts = batch.mask[:, :1]  # the method joins them to the completions before the model's call
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": batch.mask,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logps,
    }

    def loss() -> torch.Tensor:
        try:
            return GRPOTrainer._compute_loss(trainer, None, inputs)
        except LoggingBegins as stop:
            # One frame down; held in no variable, or a cycle of frames would keep the graph alive.
            return stop.__traceback__.tb_next.tb_frame.f_locals["loss"]

    return loss


def our_step(name: str, batch: TokenBatch, metrics: bool) -> Step:
    objective = Objective(algorithm(name))

    def step() -> None:
        batch.logps.grad = None
        out = objective(batch)
        out.loss.backward()
        if metrics:
            _ = out.metrics

    return step


def trl_step(batch: TokenBatch, metrics: bool) -> Step:
    loss = trl_loss(batch, metrics)

    def step() -> None:
        batch.logps.grad = None
        loss().backward()

    return step


def check_same(batch: TokenBatch) -> None:
    """Ours and TRL's GRPO are the same function on this batch."""
    results = []
    ours = Objective(algorithm("grpo"))(batch).loss
    for loss in (ours, trl_loss(batch, metrics=True)(), trl_loss(batch, metrics=False)()):
        results.append((loss.detach(), *torch.autograd.grad(loss, batch.logps)))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-8)


def measure(steps: dict[Key, Step], rounds: int, device: str) -> dict[Key, list[float]]:
    """Milliseconds of each step in each of the interleaved rounds, after a warm-up."""
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for index in range(-2, rounds):
        for key, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= 0:
                times[key].append(1e3 * (time.perf_counter() - start))
    return times


def report(device: str, rounds: int) -> dict[bool, float]:
    """Prints the table of one device; returns sa-ah-abc-grpo's ratios, without and with metrics."""
    batch = make_batch(device)
    check_same(batch)
    steps = {}
    for metrics in (False, True):
        steps["TRL grpo", metrics] = trl_step(batch, metrics)
        steps |= {(name, metrics): our_step(name, batch, metrics) for name in ALGORITHMS}
    times = measure(steps, rounds, device)
    ratios = {}
    for (name, metrics), values in times.items():
        pairs = zip(values, times["TRL grpo", metrics], strict=True)
        ratios[name, metrics] = median(ours / theirs for ours, theirs in pairs)
    print(f"{device}: loss and gradient on [{ROLLOUTS}, {TOKENS}] tokens, float32")
    print(f"{'ms (x TRL grpo)':18}{'without metrics':>18}{'with metrics':>18}")
    for name in ("TRL grpo", *ALGORITHMS):
        keys = ((name, False), (name, True))
        cells = (f"{median(times[key]):11.2f} ({ratios[key]:.2f})" for key in keys)
        print(f"{name:18}" + "".join(cells))
    return {metrics: ratios["sa-ah-abc-grpo", metrics] for metrics in (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: each that there is")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    devices = [options.device] if options.device else ["cpu"]
    if options.device is None and torch.cuda.is_available():
        devices.append("cuda")
    for device, ratios in {device: report(device, options.rounds) for device in devices}.items():
        verdict = "within" if max(ratios.values()) <= LIMIT else "ABOVE"
        print(
            f"{device}: sa-ah-abc-grpo / TRL's grpo = {ratios[False]:.2f} without metrics, "
            f"{ratios[True]:.2f} with ({verdict} {LIMIT})"
        )


if __name__ == "__main__":
    main()
