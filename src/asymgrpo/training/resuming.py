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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from asymgrpo.errors import UserError
from asymgrpo.secrets import without_secrets

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
)
"""Attributes of the trainer that live from one step to the next."""


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
            f"{checkpoint} is damaged or of another model ({cause}); remove it to go on from an "
            "earlier one, or choose another --out"
        ) from error


def _trainer_state(checkpoint: Any) -> dict[str, Any]:
    path = Path(checkpoint) / "trainer_state.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


class Resuming:
    """Saving to a side folder that becomes the checkpoint in one rename, and loading all back."""

    accelerator: Any
    args: Any
    state: Any
    _metrics: dict[str, Any]
    _staging: str | None = None
    _epochs_done: int = 0
    _weights_to_save: Callable[[], dict[str, torch.Tensor] | None]
    _say: Callable[[str], None]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._checkpoint_path(resume_from_checkpoint)
        self._epochs_done = 0
        if checkpoint is not None:
            with _readable(checkpoint):
                self._epochs_done = math.floor(_trainer_state(checkpoint)["epoch"])
        return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _checkpoint_path(self, asked: Any) -> str | None:
        """The checkpoint that `train` was asked to go on from; True is the last one there is."""
        if asked is None or asked is False:
            return None
        if asked is not True:
            return str(asked)
        found = checkpoints(self.args.output_dir)
        if not found:
            raise ValueError(
                f"{self.args.output_dir} holds no checkpoint to resume from; train without "
                "resume_from_checkpoint, or name a checkpoint"
            )
        return str(found[-1])

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
        kept = {name: getattr(self, name) for name in BETWEEN_STEPS}
        kept["batches"] = self._batch_shape()
        kept["_metrics"] = {key: list(value) for key, value in self._metrics["train"].items()}
        path = folder / f"checkpoint-{self.state.global_step}" / self._own_file()
        torch.save(kept, path)

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
        with _readable(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: Any) -> None:
        if self.accelerator.scaler is not None:  # else transformers fails on a stray file
            with _readable(checkpoint):
                super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        with _readable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            path = Path(checkpoint) / self._own_file() if checkpoint else None
            if path is None or not path.is_file():  # a checkpoint of stock TRL's holds none
                return
            kept = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        self._metrics["train"].update(kept.pop("_metrics"))
        if kept.pop("batches") != self._batch_shape():
            # Its rollouts do not fit the batches that follow, so they are sampled anew, as in TRL.
            with _readable(checkpoint):
                steps = _trainer_state(checkpoint)["global_step"]
            kept |= {"_buffered_inputs": None, "_sampled_rows": []}
            kept["_step"] = steps * self.args.gradient_accumulation_steps
            self._say(f"{checkpoint} has batches of another shape; its rollouts are sampled anew")
        for name, value in kept.items():
            setattr(self, name, value)
