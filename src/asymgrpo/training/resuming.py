"""Checkpoints that are whole or absent, and that hold all a run needs to go on as if never cut.

TRL keeps rollouts, counters and metrics between steps that its checkpoints leave out. Mixed into
the TRL trainer; knows its attributes, and imports nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from asymgrpo.errors import UserError
from asymgrpo.secrets import without_secrets
from asymgrpo.training.manifest import damage, newest_whole, write_manifest
from asymgrpo.training.processes import from_main

BETWEEN_STEPS = (
    "_step",
    "_buffered_inputs",
    "_rollout_batches",
    "_compared_batch",
    "_turn",
    "_eval_turn",
    "_sampled_rows",
    "_metric_sums",
    "_entropy_window_stats",
    "_last_world_entropy",
    "entropy_coef",
    "_seconds",
    "_sampled_tokens",
)
"""Attributes of the trainer that live from one step to the next."""
LOSS = ("_tr_loss", "_globalstep_last_logged")
"""The same, but set anew as a loop begins: the loss until the next line is logged."""
REFERENCE = "asymgrpo-reference.pt"
"""The reference model where it moves, as under sync_ref_model."""
EXACT = ("optimizer.pt", "scheduler.pt")
"""Without these a run goes on from the weights alone."""
STEPLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules of the learning rate that do not depend on how many steps a run has."""


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints under `folder`, oldest first.

    >>> checkpoints("/nowhere")
    []
    """
    found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(folder).glob("*"))
    return [
        Path(folder) / match[0] for match in sorted(filter(None, found), key=lambda m: int(m[1]))
    ]


def sync_folder(folder: Path, deep: bool = True) -> None:
    """Make what lies in `folder` outlast a power cut; not `deep`, its names alone."""
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def writing(staging: Path, target: Path) -> Iterator[None]:
    """Within, a write that fails is one line about `target`, and `staging` is cleared away.

    Of a full disk, torch and safetensors say so by errors of their own.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        cause = " ".join(str(error).split())[:200]
        raise UserError(
            f"{target} cannot be written ({cause}); free some space or mend the folder, then run "
            "the same command again"
        ) from error


def set_usual_modes(folder: Path) -> None:
    """Give the files in `folder` the mode that the umask gives: safetensors lets none but the owner
    read what it writes."""
    probe = folder / ".mode"  # the umask itself cannot be read without changing it for a moment
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def put_in_place(made: Path, target: Path) -> None:
    """Let the folder `made` become `target`, whole, also across a power cut."""
    set_usual_modes(made)
    sync_folder(made)
    shutil.rmtree(target, ignore_errors=True)  # one of an earlier try
    made.rename(target)
    sync_folder(target.parent, deep=False)


def clear_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of saving or of removing a checkpoint leaves.

    >>> clear_leftovers(Path("/nowhere"))
    """
    for pattern in (".saving-*", ".removing-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


@contextlib.contextmanager
def _readable(checkpoint: Any) -> Iterator[None]:
    """Within, a checkpoint that is damaged, or of another model, is one line."""
    try:
        yield
    except (
        OSError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        SafetensorError,
        pickle.UnpicklingError,
    ) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint} is damaged or of another model ({cause}); rename it, for example to "
            f"damaged-{Path(checkpoint).name}, to go on from an earlier one, or choose another "
            "--out"
        ) from error


def _trainer_state(checkpoint: Any) -> dict[str, Any]:
    path = Path(checkpoint) / "trainer_state.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def callback_state(callback: Any) -> dict[str, Any] | None:
    """What a callback keeps from one step to the next; None of one that keeps nothing.

    A callback of ours names it in `between_steps`, one of transformers' exports it.

    >>> from transformers import EarlyStoppingCallback
    >>> callback_state(EarlyStoppingCallback(3))
    {'early_stopping_patience_counter': 0}
    """
    names = getattr(callback, "between_steps", None)
    if names is not None:
        return {name: getattr(callback, name) for name in names}
    if isinstance(callback, ExportableState) and isinstance(callback, TrainerCallback):
        return dict(callback.state().get("attributes", {}))
    return None


class RestoreLoss(TrainerCallback):
    """Gives a resumed loop the loss since the last logged line, which it has just set to zero."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, kept = self.trainer, self.trainer._kept_loss
        if kept is None:
            return
        trainer._kept_loss = None
        trainer._tr_loss += kept["_tr_loss"].to(trainer._tr_loss.device)
        trainer._globalstep_last_logged = kept["_globalstep_last_logged"]
        # The mean loss that the end reports is of the steps of this call alone.
        trainer._total_loss_scalar -= trainer._tr_loss.item()


class Resuming:
    """Saving to a side folder that becomes the checkpoint in one rename, and loading all back."""

    accelerator: Any
    args: Any
    state: Any
    _metrics: dict[str, Any]
    _staging: str | None = None
    _epochs_done: int = 0
    _verified: str | None = None
    _kept_loss: dict[str, Any] | None = None
    callback_handler: Any
    ref_model: Any
    lr_scheduler: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    _logs: dict[str, Any]
    _weights_to_save: Callable[[], dict[str, torch.Tensor] | None]
    _say: Callable[[str], None]

    @property
    def _sharded(self) -> bool:
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._checkpoint_path(resume_from_checkpoint)
        self._epochs_done, self._kept_loss = 0, None
        if checkpoint is not None:
            with _readable(checkpoint):
                self._epochs_done = math.floor(_trainer_state(checkpoint)["epoch"])
            if not any(isinstance(c, RestoreLoss) for c in self.callback_handler.callbacks):
                self.callback_handler.add_callback(RestoreLoss(self))
        return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def newest_checkpoint(self) -> str | None:
        """The last checkpoint that is as it was saved; damaged ones after it are set aside.

        The main process looks, and every process gets its answer.
        """
        found = None
        if self.accelerator.is_main_process:
            found = newest_whole(checkpoints(self.args.output_dir), self._say)
        self._verified = from_main(str(found) if found else None, self.accelerator.device)
        return self._verified

    def _checkpoint_path(self, asked: Any) -> str | None:
        """The checkpoint that `train` was asked to go on from; True is the last one there is."""
        if asked is None or asked is False:
            return None
        if asked is True:
            newest = self.newest_checkpoint()
            if newest is None:
                raise ValueError(
                    f"{self.args.output_dir} holds no checkpoint to resume from; train without "
                    "resume_from_checkpoint, or name a checkpoint"
                )
            return newest
        if str(asked) != self._verified:
            main = self.accelerator.is_main_process
            wrong = from_main(damage(Path(asked)) if main else None, self.accelerator.device)
            if wrong is not None:
                raise UserError(f"{asked} is damaged ({wrong}); go on from an earlier checkpoint")
        return str(asked)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's, moved past the epochs of the checkpoint: it draws a new order for each."""
        sampler = super()._get_train_sampler(dataset)  # type: ignore[misc]
        if getattr(sampler, "shuffle", False):
            for _ in range(self._epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir)
        staging = folder / f".saving-{self.state.global_step}"
        if self.accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = str(staging)
        try:
            with writing(staging, folder / f"checkpoint-{self.state.global_step}"):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._name_best_checkpoint(folder, staging)
                self._save_between_steps(staging)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (made,) = checkpoints(staging)
            with writing(staging, folder / made.name):
                write_manifest(made)
            put_in_place(made, folder / made.name)
            staging.rmdir()
            self._drop_old_checkpoints()
        self.accelerator.wait_for_everyone()

    def _name_best_checkpoint(self, folder: Path, staging: Path) -> None:
        """Let the state, also the one just saved, name the best checkpoint where it will lie."""
        if not self.state.best_global_step:
            return
        current = f"checkpoint-{self.state.global_step}"
        best = folder / f"checkpoint-{self.state.best_global_step}"
        if best.name == current or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staging / current / "trainer_state.json"))

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        """transformers', but the settings that it saves beside the weights hold no secret."""
        if state_dict is None and self._staging is None:
            # A checkpoint's optimizer holds the masters; a saved model has nothing but itself.
            state_dict = self._weights_to_save()
        with without_secrets(self, "args"):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_between_steps(self, folder: Path) -> None:
        place = folder / f"checkpoint-{self.state.global_step}"
        kept = {name: getattr(self, name) for name in (*BETWEEN_STEPS, *LOSS)}
        kept["batches"] = self._batch_shape()
        kept["_metrics"] = {key: list(value) for key, value in self._metrics["train"].items()}
        kept["_logs"] = _plain_logs(self._logs)
        kept["callbacks"] = [
            (type(callback).__name__, state)
            for callback in self.callback_handler.callbacks
            if (state := callback_state(callback)) is not None
        ]
        torch.save(kept, place / self._own_file())
        if self._reference_moves() and self.args.should_save:
            torch.save(dict(self.ref_model.named_parameters()), place / REFERENCE)

    def _reference_moves(self) -> bool:
        """Whether the reference model changes while training, so that checkpoints must hold it."""
        moves = bool(self.args.sync_ref_model) and self.ref_model is not None
        if moves and self._sharded:
            raise UserError(
                "sync_ref_model cannot be kept in checkpoints while FSDP or DeepSpeed shard the "
                "weights; set sync_ref_model=false, or save_strategy=no"
            )
        return moves

    def _batch_shape(self) -> dict[str, int]:
        """What the rollouts and counters of a checkpoint depend on."""
        names = [
            *("steps_per_generation", "num_iterations", "num_generations"),
            *("per_device_train_batch_size", "gradient_accumulation_steps", "world_size"),
        ]
        return {name: int(getattr(self.args, name)) for name in names}

    def _own_file(self) -> str:
        return f"asymgrpo-{self.accelerator.process_index}.pt"

    def _drop_old_checkpoints(self) -> None:
        """Keep `save_total_limit` of them; the last and the best always stay."""
        found = checkpoints(self.args.output_dir)
        best = self.state.best_model_checkpoint
        kept = {found[-1].name} | ({Path(best).name} if best else set())
        limit = max(self.args.save_total_limit or len(found), len(kept))
        for old in [path for path in found if path.name not in kept][: max(len(found) - limit, 0)]:
            doomed = old.with_name(f".removing-{old.name}")
            old.rename(doomed)
            shutil.rmtree(doomed)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        with _readable(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        together = self.args.world_size > 1
        name = f"rng_state_{self.args.process_index}.pth" if together else "rng_state.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            self._say(f"{checkpoint} has no {name}: the random states begin anew")
        with _readable(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: Any) -> None:
        if self.accelerator.scaler is None:  # a stray file, or a run that was begun in float16
            return
        with _readable(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        with _readable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        self._continue_schedule(checkpoint)
        missing = [name for name in EXACT if not (Path(checkpoint) / name).is_file()]
        if missing and not self._sharded:
            self._say(
                f"{checkpoint} has no {' and no '.join(missing)}: the optimizer and the learning "
                "rate begin anew"
            )
        path = Path(checkpoint) / self._own_file()
        if not path.is_file():  # a checkpoint of stock TRL's holds none
            self._say(f"{checkpoint} has no {path.name}: its rollouts are sampled anew")
            return
        with _readable(checkpoint):
            # A processor has no number, though accelerate gives it one.
            device = self.accelerator.device
            kept = torch.load(
                path, map_location="cpu" if device.type == "cpu" else device, weights_only=True
            )
            self._restore_reference(Path(checkpoint))
        self._restore(checkpoint, kept)

    def _restore(self, checkpoint: Any, kept: dict[str, Any]) -> None:
        self._metrics["train"].update(kept.pop("_metrics"))
        _fill_logs(self._logs, kept.pop("_logs", {}))
        if all(name in kept for name in LOSS):  # checkpoints of an earlier version lack it
            self._kept_loss = {name: kept.pop(name) for name in LOSS}
        states = kept.pop("callbacks", [])
        for callback in self.callback_handler.callbacks:
            for number, (name, _) in enumerate(states):
                if name == type(callback).__name__:
                    vars(callback).update(states.pop(number)[1])
                    break
        if kept.pop("batches") != self._batch_shape():
            # Its rollouts do not fit the batches that follow, so they are sampled anew, as in TRL.
            with _readable(checkpoint):
                steps = _trainer_state(checkpoint)["global_step"]
            kept |= {"_buffered_inputs": None, "_sampled_rows": []}
            kept["_step"] = steps * self.args.gradient_accumulation_steps
            self._say(f"{checkpoint} has batches of another shape; its rollouts are sampled anew")
        for name, value in kept.items():
            setattr(self, name, value)

    def _restore_reference(self, checkpoint: Path) -> None:
        path = checkpoint / REFERENCE
        if not self._reference_moves():
            return
        if not path.is_file():
            self._say(f"{checkpoint} has no {path.name}: the reference model begins anew")
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        for name, parameter in self.ref_model.named_parameters():
            parameter.data.copy_(saved[name])

    def _continue_schedule(self, checkpoint: Any) -> None:
        """Where a run is extended, its learning rate is that of the longer schedule from here."""
        with _readable(checkpoint):
            state = _trainer_state(checkpoint)
            before, done = int(state["max_steps"]), int(state["global_step"])
        if before == self.args.max_steps or self.args.max_steps <= 0 or before <= 0:
            return
        kind = self.args.lr_scheduler_type
        kind = getattr(kind, "value", str(kind))
        if kind in STEPLESS_SCHEDULES and not 0 < self.args.warmup_steps < 1:
            return
        old = [group["lr"] for group in self.optimizer.param_groups]
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LambdaLR):
            plan = self.lr_scheduler
            new = [
                base * share(plan.last_epoch)
                for base, share in zip(plan.base_lrs, plan.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.optimizer.param_groups, new, strict=True):
                group["lr"] = rate
            self.lr_scheduler._last_lr = new
        rates = f"{old[0]:.3g} becomes {self.optimizer.param_groups[0]['lr']:.3g}"
        self._say(
            f"extended from {before} to {self.args.max_steps} steps: the schedule {kind} depends "
            f"on their number, so after step {done} the learning rate {rates}, and the run differs "
            f"from an uncut one of {self.args.max_steps} steps"
        )


def _plain_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The completions that TRL logs, in types that are read back without unpickling objects."""
    return {key: _plain(value) for key, value in logs.items() if key != "images"}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(each) for each in value]
    plain = value is None or type(value) in (str, int, float, bool)
    return value if plain else str(value)  # an image, or an object of a reward function's


def _fill_logs(logs: dict[str, Any], kept: Mapping[str, Any]) -> None:
    for key, value in kept.items():
        if isinstance(value, Mapping):
            for name, values in value.items():
                logs[key][name].extend(values)
        else:
            logs[key].extend(value)
