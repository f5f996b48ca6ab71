"""A whole training step, rollouts included: our trainer beside TRL's, each as a user runs it.

    python benchmarks/step.py [--shape 1.5b|demo] [--steps 6] [--trl-steps 2]

`subjects.py` says what the shapes are. Every trainer gets the same prompts, reward and settings;
TRL's defaults stay as they are. vLLM takes part where it is importable. Our two algorithms, and in
the demo all trainers, take turns, since a machine is not equally fast all the time. Steps that
share a rollout batch count as one, divided by their number; the first half of a turn, in which
things are compiled, is left out of the medians; ratios come last.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from subjects import Subject, now, subject
from trl import GRPOConfig, GRPOTrainer
from update import SHAPES

from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer


class Clock(transformers.TrainerCallback):
    """Seconds of every optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self._start)


def run(kind: str, what: Subject, batches: int, options: dict[str, Any]) -> list[float]:
    """Seconds a step, by rollout batch."""
    clock = Clock()
    accumulation = what.arguments.get("gradient_accumulation_steps", 1)
    steps = what.arguments.get("steps_per_generation", accumulation) // accumulation
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "max_steps": batches * steps,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        ours = kind.startswith("asymgrpo")
        arguments = (AsymGRPOConfig if ours else GRPOConfig)(**what.arguments, **common, **options)
        trainer = (AsymGRPOTrainer if ours else GRPOTrainer)(
            model=what.model(),
            reward_funcs=what.reward,
            args=arguments,
            train_dataset=what.data,
            processing_class=what.tokenizer,
            peft_config=what.peft_config,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        history = trainer.state.log_history
    for row in [row for row in history if "time/rollout" in row][-1:]:
        parts = {name: row[f"time/{name}"] for name in ("rollout", "update")}
        print("  " + ", ".join(f"{name} {value:.3f} s" for name, value in parts.items()))
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = clock.seconds
    return [sum(seconds[i : i + steps]) / steps for i in range(0, len(seconds), steps)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="1.5b" if torch.cuda.is_available() else "demo"
    )
    parser.add_argument("--steps", type=int, default=6, help="rollout batches")
    parser.add_argument("--trl-steps", type=int, default=2, help="the same for TRL by generate")
    options = parser.parse_args()
    ours = {
        "asymgrpo, grpo": (options.steps, {"algorithm": "grpo"}),
        "asymgrpo, sa-ah-grpo": (options.steps, {"algorithm": "sa-ah-grpo"}),
    }
    others: dict[str, tuple[int, dict[str, Any]]] = {
        # The demo's completions change as the model learns: like is compared with like.
        "TRL, generate": (options.steps if options.shape == "demo" else options.trl_steps, {}),
    }
    if options.shape == "demo":
        plain = {"algorithm": "grpo", "engine": "transformers", "scorer": "padded"}
        others["asymgrpo, transformers and padded"] = (options.steps, plain)
    elif importlib.util.find_spec("vllm") is not None:
        others["TRL, vLLM"] = (options.steps, {"use_vllm": True, "vllm_mode": "colocate"})
    else:
        print("vllm is not importable here, so TRL with vLLM takes no part")
    turns = [*ours.items(), *ours.items(), *others.items()]
    if options.shape == "demo":
        turns = 2 * [*ours.items(), *others.items()]
    late: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        what = subject(options.shape, Path(folder))
        for kind, (batches, chosen) in turns:
            print(kind, flush=True)
            seconds = run(kind, what, batches, chosen)
            late.setdefault(kind, []).extend(seconds[len(seconds) // 2 :])
            print(f"  seconds a step: {', '.join(f'{x:.3f}' for x in seconds)}", flush=True)
    middle = {kind: median(seconds) for kind, seconds in late.items()}
    for kind, value in middle.items():
        print(f"{kind:36}{value:9.3f} s a step")
    change = middle["asymgrpo, sa-ah-grpo"] / middle["asymgrpo, grpo"] - 1
    print(f"sa-ah-grpo costs {change:+.1%} over grpo")
    for kind in others:
        print(f"asymgrpo is {middle[kind] / middle['asymgrpo, grpo']:.1f} times as fast as {kind}")


if __name__ == "__main__":
    main()
