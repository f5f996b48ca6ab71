"""Running one training run, from settings to a folder."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from asymgrpo.errors import UserError
from asymgrpo.evaluation import evaluate_policy
from asymgrpo.experiment.callbacks import HeldOut, ProgressBar, Recorder
from asymgrpo.experiment.data import load_reward, training_rows, training_set
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from asymgrpo.models import Policy, load_policy, lora_config
from asymgrpo.rollout import Sampling, choose_engine
from asymgrpo.tasks import Task, load_task
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer

VERSIONED = ("asymgrpo", "torch", "transformers", "trl", "accelerate", "peft", "datasets")


def trainer_config(settings: RunSettings, folder: Path) -> AsymGRPOConfig:
    """The trainer's configuration; a contradiction in it is the user's to mend."""
    given = dict(settings.trainer)
    fixed: dict[str, Any] = {
        "output_dir": str(folder),
        "algorithm": settings.algorithm,
        "max_steps": settings.steps,
        "seed": settings.seed,
        "engine": settings.engine,
        "scorer": settings.scorer,
        "disable_tqdm": True,
    }
    defaults: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "report_to": default_trackers()}
    if not torch.cuda.is_available():
        defaults |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    try:
        return AsymGRPOConfig(**(defaults | given | fixed))
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from error


def default_trackers() -> str:
    """TensorBoard where it is installed."""
    try:
        importlib.metadata.version("tensorboard")
    except importlib.metadata.PackageNotFoundError:
        return "none"
    return "tensorboard"


def run_record(
    settings: RunSettings, config: AsymGRPOConfig, folder: Path, device: str
) -> dict[str, Any]:
    """`run.json`: what was asked for, as resolved, and by what it is run."""
    from asymgrpo.objective.presets import OVERRIDES

    overrides = {key: settings.trainer[key] for key in OVERRIDES if key in settings.trainer}
    return {
        "name": folder.name,
        "status": "running",
        "algorithm": settings.algorithm,
        "label": settings.label,
        "overrides": overrides,
        "objective": asdict(config.objective()),
        "model": settings.model,
        "task": settings.task,
        "seed": settings.seed,
        "steps": settings.steps,
        "config": {k: v for k, v in settings.trainer.items() if k not in overrides},
        "settings": settings.to_dict(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED}
        | {"python": platform.python_version()},
        "device": device,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def open_store(settings: RunSettings, folder: Path) -> RunStore:
    """The run's folder, new or holding this very run."""
    store = RunStore(folder)
    if store.exists():
        if store.run().get("settings") != settings.to_dict():
            raise UserError(
                f"{folder} holds another run; choose another --out, or remove the folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and holds no run; choose another --out")
    return store


def prompts_needed(settings: RunSettings, config: AsymGRPOConfig) -> int:
    """Prompts that the whole run reads."""
    micro_steps = settings.steps * config.gradient_accumulation_steps
    batches = math.ceil(micro_steps / (config.steps_per_generation * config.num_iterations))
    return batches * int(config.generation_batch_size // config.num_generations)


def held_out_evaluation(
    settings: RunSettings, config: AsymGRPOConfig, policy: Policy, task: Task, model: Any
) -> Any:
    """A function from a step to its evaluation: the same problems and seeds at every step."""
    engine, _ = choose_engine(settings.engine, model, policy.tokenizer)
    test = task.examples("test")
    examples = [test[index] for index in range(min(settings.eval_problems, len(test)))]
    sampling = Sampling(max_new_tokens=config.max_completion_length, temperature=config.temperature)

    def evaluate(step: int) -> dict[str, Any]:
        return evaluate_policy(
            engine,
            policy.tokenizer,
            task,
            examples,
            samples=settings.eval_samples,
            ks=[k for k in (1, 2, 4, 8, 16, 32, 64) if k <= settings.eval_samples],
            sampling=sampling,
            seed=0,
        )

    return evaluate


def train_run(
    settings: RunSettings,
    folder: Path,
    console: Console | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunStore:
    """Train as `settings` say, into `folder`; a finished run is left as it is."""
    config = trainer_config(settings, folder)
    store = open_store(settings, folder)
    if store.exists() and store.run()["status"] == "finished":
        return store
    task = load_task(settings.task, path=settings.task_path, prompt=settings.prompt)
    set_seed(settings.seed)
    policy = load_policy(settings.model, trust_remote_code=settings.trust_remote_code)
    rows = training_rows(task, prompts_needed(settings, config), settings.seed)
    store.write_run(run_record(settings, config, folder, str(config.device)))
    store.truncate_metrics(0)
    trainer = AsymGRPOTrainer(
        model=policy.model,
        args=config,
        reward_funcs=[load_reward(name, task) for name in settings.reward or ("task",)],
        train_dataset=training_set(task, rows, policy.tokenizer),
        processing_class=policy.tokenizer,
        peft_config=lora_config(settings.lora) if settings.lora else None,
        rollout_sink=store.write_rollouts if settings.sample_every else None,
        sample_every=max(settings.sample_every, 1),
        sampled_groups=settings.sample_groups,
        callbacks=[Recorder(store), *callbacks],
    )
    if settings.eval_every:
        evaluate = held_out_evaluation(settings, config, policy, task, trainer.model)
        trainer.add_callback(HeldOut(store, evaluate, settings.eval_every))
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    if console is not None:
        trainer.add_callback(ProgressBar(settings.label, console))
    started = time.monotonic()
    trainer.train()
    trainer.save_model(str(folder / "final"))
    policy.tokenizer.save_pretrained(str(folder / "final"))
    store.update_run(status="finished", seconds=time.monotonic() - started)
    return store
