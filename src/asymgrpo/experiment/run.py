"""Running one training run, from settings to a folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from asymgrpo.errors import Interrupted, UserError
from asymgrpo.evaluation import evaluate_policy
from asymgrpo.experiment.callbacks import ConstantReward, HeldOut, ProgressBar, Recorder
from asymgrpo.experiment.checks import check_trainer, check_weights, settings_at_fault
from asymgrpo.experiment.data import check_lengths, load_reward
from asymgrpo.experiment.display import tell
from asymgrpo.experiment.held_out import held_out_rows, refuse_edited_rows, regroup
from asymgrpo.experiment.identity import NOT_IDENTITY, differences
from asymgrpo.experiment.inputs import input_digests, refuse_changed_inputs
from asymgrpo.experiment.interruption import interruptible
from asymgrpo.experiment.lock import alone_in
from asymgrpo.experiment.machine import changed_machine, machine_facts
from asymgrpo.experiment.plan import is_done, refuse_another_run, with_steps
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from asymgrpo.models import Policy, load_policy, lora_config
from asymgrpo.objective.presets import OVERRIDES
from asymgrpo.rollout import Sampling
from asymgrpo.secrets import redacted
from asymgrpo.tasks import Task, load_task
from asymgrpo.training.processes import from_main, wait_for_all
from asymgrpo.training.resuming import clear_leftovers, put_in_place, writing
from asymgrpo.training.task_data import (
    ENDLESS,
    check_rows,
    prompts_needed,
    training_rows,
    training_set,
)
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer

SYNONYMS = ("loss_type", "epsilon", "epsilon_high", "importance_sampling_level", "scale_rewards",
            "top_entropy_quantile", "sapo_temperature_pos", "sapo_temperature_neg",
            "use_bias_correction_kl")  # fmt: skip
"""TRL's names for what the objective decides, which the record has in full."""
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
    defaults: dict[str, Any] = {
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 50,
        "save_total_limit": 2,
        "report_to": default_trackers(),
    }
    if not torch.cuda.is_available():
        if given.get("fp16"):
            raise UserError("fp16 needs a GPU; set bf16=true, or leave both out")
        defaults |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    check_trainer(defaults | given, settings.engine)
    training_sampling(given)
    try:
        return AsymGRPOConfig(**(defaults | given | fixed))
    except (ValueError, TypeError, ImportError) as error:
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
    overrides, now = settings.overrides, sitting()
    record = {
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
        "resolved": resolved_settings(config),
        "versions": now["versions"],
        "device": device,
        "machine": now["machine"],
        "created": now["date"],
        "sittings": [now],
    }
    return redacted(record)


def versions() -> dict[str, str]:
    """Of the libraries that can change a result.

    >>> sorted(versions())[-1]
    'trl'
    """
    found = {name: importlib.metadata.version(name) for name in VERSIONED}
    return found | {"python": platform.python_version()}


def resolved_settings(config: AsymGRPOConfig) -> dict[str, Any]:
    """The trainer's settings as they ended up, defaults and machine included, that can matter."""
    said_elsewhere = {*OVERRIDES, *RunSettings.__dataclass_fields__, *SYNONYMS, "max_steps"}
    values = {
        key: value
        for key, value in config.to_dict().items()
        if key not in said_elsewhere and key not in NOT_IDENTITY
    }
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain | {"processes": config.world_size}


def kept_record(
    store: RunStore, settings: RunSettings, record: Mapping[str, Any]
) -> dict[str, Any]:
    """What is known of this run so far; refuses a folder that holds anything but this very run."""
    folder = store.folder
    refuse_another_run(store, settings)
    if not store.exists():
        if folder.exists() and (not folder.is_dir() or holds_something(folder)):
            raise UserError(f"{folder} exists and holds no run; choose another --out")
        return {}
    before = store.run()
    if not is_done(before, settings):
        refuse_other_trainer(store, record)
    return before


def refuse_other_trainer(store: RunStore, record: Mapping[str, Any]) -> None:
    """A run goes on as it began: not in another precision, or on another number of processes."""
    kept = store.run()
    # An older record may lack pieces that came later; what they were set by is in its settings.
    parts = {name: filled(kept.get(name) or {}, record[name]) for name in ("objective", "resolved")}
    found = differences(with_steps(kept | parts, record["steps"]), record)
    if found:
        raise UserError(
            f"{store.folder} was begun otherwise ({'; '.join(found[:3])}); go on as it began, or "
            "choose another --out"
        )


def filled(kept: Any, newer: Any) -> Any:
    """`kept` with what only `newer` has, at any depth.

    >>> filled({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}, "d": 4})
    {'a': {'b': 1, 'c': 3}, 'd': 4}
    """
    if not isinstance(kept, Mapping) or not isinstance(newer, Mapping):
        return kept
    return {**kept, **{k: filled(kept[k], v) if k in kept else v for k, v in newer.items()}}


def sitting() -> dict[str, Any]:
    """This process as one of those that worked on a run: when, by which versions, and on what."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine_facts(),
    }


def with_history(record: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run that goes on: it was made when it was, and has one sitting more.

    >>> old = {"created": "then", "versions": {"torch": "1"}, "sittings": [{"date": "then"}]}
    >>> new = {"created": "now", "versions": {"torch": "2"}, "sittings": [{"date": "now"}]}
    >>> with_history(new, old)["sittings"]
    [{'date': 'then'}, {'date': 'now'}]
    """
    kept = {key: before[key] for key in ("created", "versions", "inputs") if before.get(key)}
    first = {"date": before.get("created"), "versions": before.get("versions")}
    sittings = before.get("sittings") or ([first] if before.get("created") else [])
    return record | kept | {"sittings": [*sittings, *record["sittings"]]}


def holds_something(folder: Path) -> bool:
    """Whether anything is in `folder` but what a kill before the first write leaves."""
    own = (".lock", ".run.json.*.tmp")
    return any(not any(path.match(name) for name in own) for path in folder.iterdir())


def training_sampling(trainer: Mapping[str, Any], **changes: Any) -> Sampling:
    """How a run samples, by the trainer's fields; so held-out problems are sampled as well.

    >>> training_sampling({"max_completion_length": 64, "top_k": None}, temperature=0.5)
    Sampling(max_new_tokens=64, temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, \
repetition_penalty=1.0, greedy=False, stop=())
    """
    names = {"max_completion_length": "max_new_tokens"}
    names |= {n: n for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    given = {ours: trainer[n] for n, ours in names.items() if trainer.get(n) is not None}
    stop = (trainer.get("generation_kwargs") or {}).get("stop_strings") or ()
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given |= {name: value for name, value in changes.items() if value is not None}
    try:
        return Sampling(**given)
    except ValueError as error:
        raise UserError(str(error)) from None


def held_out_evaluation(
    settings: RunSettings, config: AsymGRPOConfig, policy: Policy, task: Task, trainer: Any
) -> Any:
    """A function from a step to its evaluation: the same problems and seeds at every step.

    It samples with the trainer's own engine, so that a run has one.
    """
    examples = held_out_rows(task, settings)
    sampling = training_sampling(vars(config))

    def evaluate(step: int) -> dict[str, Any]:
        return evaluate_policy(
            trainer.engine(),
            policy.tokenizer,
            task,
            examples,
            samples=settings.eval_samples,
            ks=[k for k in (1, 2, 4, 8, 16, 32, 64) if k <= settings.eval_samples],
            sampling=sampling,
            seed=0,
            system_prompt=settings.system_prompt,
            template=config.chat_template_kwargs,
            cluster=settings.cluster,
        )

    return evaluate


def take_back(store: RunStore, checkpoint: str | None, main: bool) -> None:
    """Remove what was logged after the checkpoint that a run goes on from, and leftovers of kills.

    The main process alone touches the folder, and the others wait for it.
    """
    if main:
        step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
        store.truncate_metrics(step)
        store.remove_after(step)
        clear_leftovers(store.folder)
    wait_for_all()


def rollout_sink(
    settings: RunSettings, config: AsymGRPOConfig, store: RunStore
) -> Callable[[int, list[dict[str, Any]]], None]:
    """Saves the rollouts of a step, and drops those of earlier steps that are not to be kept."""
    micro_steps = settings.sample_every * config.steps_per_generation * config.num_iterations
    spacing = max(1, micro_steps // config.gradient_accumulation_steps)

    def save(step: int, rows: list[dict[str, Any]]) -> None:
        store.write_rollouts(step, rows)
        store.thin_rollouts(settings.keep_rollouts, spacing)

    return save


def build_trainer(
    settings: RunSettings, config: AsymGRPOConfig, store: RunStore, task: Task, policy: Policy
) -> AsymGRPOTrainer:
    """The trainer of a run, recording into its store."""
    rows = training_rows(task, prompts_needed(config), settings.seed)
    data = training_set(task, rows, policy.tokenizer, settings.system_prompt)
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    check_lengths(data, policy.tokenizer, context, config.max_completion_length)
    check_rows(task.name, len(rows), config)
    names = settings.reward or ("task",)
    rewards = [load_reward(name, task, settings.reward_timeout) for name in names]
    with settings_at_fault():
        trainer = AsymGRPOTrainer(
            model=policy.model,
            args=config,
            reward_funcs=rewards,
            train_dataset=data,
            processing_class=policy.tokenizer,
            peft_config=lora_config(settings.lora) if settings.lora else None,
            rollout_sink=rollout_sink(settings, config, store) if settings.sample_every else None,
            sample_every=max(settings.sample_every, 1),
            sampled_groups=settings.sample_groups,
            callbacks=[Recorder(store), ConstantReward()],
        )
    trainer.base_model = settings.model
    if settings.eval_every:
        refuse_edited_rows(store, held_out_rows(task, settings))
        evaluate = held_out_evaluation(settings, config, policy, task, trainer)
        trainer.add_callback(HeldOut(store, evaluate, settings.eval_every))
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    return trainer


def train_run(
    settings: RunSettings,
    folder: Path,
    console: Console | None = None,
    say: Callable[[str], None] | None = None,
) -> RunStore:
    """Train as `settings` say, into `folder`, from where it was cut off if it was.

    A finished run of as many steps is left as it is; of fewer, it is extended. Ctrl-C and SIGTERM
    end it after a checkpoint, with `Interrupted`. Of several processes, the main one writes. What a
    person should know of how it goes on is printed, or goes to `say`.
    """
    config = trainer_config(settings, folder)
    main = config.process_index == 0
    console = console if main else None
    store = RunStore(folder)
    record = run_record(settings, config, folder, str(config.device))
    before = kept_record(store, settings, record)
    wait_for_all()  # every process has read it before the main one writes
    if is_done(before, settings):
        if main:
            regroup(store, settings)
        return store
    task = load_task(settings.task, path=settings.task_path, prompt=settings.prompt)
    set_seed(settings.seed)
    policy = load_policy(settings.model, trust_remote_code=settings.trust_remote_code)
    check_weights(policy.model, settings.model)
    trainer = build_trainer(settings, config, store, task, policy)
    with alone_in(folder) if main else contextlib.nullcontext():
        # Another command may have begun a run here, or ended this one, since the folder was free.
        found = kept_record(store, settings, record) if main else {}
        before = from_main(found, trainer.accelerator.device)
        if is_done(before, settings):
            return store
        if main and before:
            regroup(store, settings)
        say = say or trainer._say
        tell_of_another_machine(before, record, say)
        if trainer.precision is not None:
            record["precision"] = trainer.precision.record()
        if main:
            record["inputs"] = input_digests(settings, policy.model.config)
            refuse_changed_inputs(folder, before.get("inputs"), record["inputs"])
            record = with_history(record, before)
        checkpoint = trainer.newest_checkpoint()
        if before.get("status") == "finished" and checkpoint is None:
            raise UserError(
                f"{folder} is finished and holds no whole checkpoint to go on from; choose another "
                "--out"
            )
        more = settings.steps > before.get("steps", settings.steps)
        if more and checkpoint is not None and len(task.examples("train")) > ENDLESS:
            say(
                f"extended from {before['steps']} to {settings.steps} steps: {task.name} draws its "
                "prompts by the number of steps, so the run differs from an uncut one of "
                f"{settings.steps}"
            )
        seconds = before.get("seconds") or 0.0
        if main:
            store.write_run(record | {"seconds": seconds})
        started = time.monotonic()
        try:
            finished = train_on(trainer, store, settings, console, checkpoint)
            if finished:
                save_final(trainer, policy, folder)
        except BaseException:
            if main:
                with contextlib.suppress(OSError):  # a full disk, of which the first error tells
                    store.update_run(status="failed", seconds=seconds + time.monotonic() - started)
            raise
        status = "finished" if finished else "interrupted"
        if main:
            store.update_run(status=status, seconds=seconds + time.monotonic() - started)
    wait_for_all()  # a launcher ends all processes once one of them has ended
    if not finished:
        raise Interrupted
    return store


def tell_of_another_machine(
    before: Mapping[str, Any], record: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """One line where a run goes on with other threads, or on another machine, than it began."""
    line = changed_machine(before.get("machine") or {}, record["machine"])
    if line:
        say(line)


def train_on(
    trainer: AsymGRPOTrainer,
    store: RunStore,
    settings: RunSettings,
    console: Console | None,
    checkpoint: str | None,
) -> bool:
    """Train from the checkpoint; whether it got to the end, and not to a signal."""
    with interruptible() as interruption:
        take_back(store, checkpoint, trainer.args.process_index == 0)
        bar = None if console is None else ProgressBar(settings.label, console)
        if console is not None and checkpoint is not None:
            tell(console, f"going on from {checkpoint}")
        if bar is not None:
            trainer.add_callback(bar)
        trainer.add_callback(interruption)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            if bar is not None:
                bar.bar.stop()
    done: int = trainer.state.global_step
    if done < settings.steps and not interruption.requested:
        raise UserError(
            f"training stopped after {done} of {settings.steps} steps; see what it printed above"
        )
    return done >= settings.steps


def save_final(trainer: AsymGRPOTrainer, policy: Policy, folder: Path) -> None:
    """The weights and the tokenizer as `final/`, whole or not at all."""
    staging = folder / ".saving-final"
    with writing(staging, folder / "final"):
        trainer.save_model(str(staging))
        if trainer.args.should_save:
            policy.tokenizer.save_pretrained(str(staging))
            trainer.create_model_card(folder.name, folder=staging)
    if trainer.args.should_save:
        put_in_place(staging, folder / "final")
