"""The identity of a run: everything that can change its result, the seed apart. No torch.

Two runs are seeds of one variant only if their identities are equal. Plans, folders, labels,
pairs, reports and resuming all ask here. A setting counts unless `NOT_IDENTITY` names it with the
reason why it cannot change a result; one that this file has never heard of counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from asymgrpo.experiment.settings import RunSettings

Record = Mapping[str, Any]
"""`run.json`, or as much of it as is known before the run: `settings` and `objective`."""
Identity = dict[str, Any]
"""Flat: the name of a setting to its value, in plain JSON types."""

_RECORDS = "only what is written beside the run"
_TELLS = "only what is printed or sent to a tracker"
_SAVES = "only what is kept to go on from"
_HUB = "only where the weights are copied to"
_FEEDS = "only how fast rows arrive"
_PLACE = "only where it runs"

NOT_IDENTITY: dict[str, str] = {
    "seed": "tells runs of one variant apart",
    **dict.fromkeys(("output_dir", "out", "run_name"), "only a name"),
    **dict.fromkeys(
        ("sample_every", "sample_groups", "keep_rollouts", "log_completions_hub_repo"), _RECORDS
    ),
    "reward_timeout": "a reward function that overruns it ends the run",
    "cluster": "only how intervals are drawn",
    **dict.fromkeys(
        ("report_to", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
         "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "log_completions",
         "log_multimodal", "log_unique_prompts", "num_completions_to_print", "logging_first_step",
         "skip_memory_metrics", "include_num_input_tokens_seen"),
        _TELLS,
    ),
    **dict.fromkeys(
        ("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
         "enable_jit_checkpoint", "resume_from_checkpoint"),
        _SAVES,
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
         "hub_always_push", "hub_revision"),
        _HUB,
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
         "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        _FEEDS,
    ),
    **dict.fromkeys(
        ("use_cpu", "local_rank", "ddp_timeout", "vllm_server_base_url", "vllm_server_host",
         "vllm_server_port", "vllm_group_port", "vllm_server_timeout"),
        _PLACE,
    ),
}  # fmt: skip
"""Settings that cannot change a result, and why. `logging_steps` is not among them: the training
variance is measured on the log."""

NOT_SETTINGS = frozenset({
    "name", "label", "seed", "status", "created", "seconds", "finished", "versions", "device",
    "settings", "resolved", "overrides", "format", "machine", "sittings", "inputs",
})  # fmt: skip
"""Fields of `run.json` that tell of a run rather than set it, or say again what `settings` say."""

SHORT = {"learning_rate": "lr"}
"""Names that a label shortens."""
MOST_WORDS = 4
"""Settings that a label names before it counts the rest."""


def identity(record: Record, *, resolved: bool = True) -> Identity:
    """Every setting that can change the result of the run in `record`, by name.

    With `resolved`, and where the record has it, the trainer's settings are those it ended up
    with, defaults included; without, those that were given.

    >>> run = {"settings": {"lora": 8, "seed": 3, "trainer": {"learning_rate": 1e-4}}}
    >>> found = identity(run)
    >>> found["lora"], found["learning_rate"], "seed" in found
    (8, 0.0001, False)
    """
    settings = record.get("settings")
    if not isinstance(settings, Mapping):
        return _foreign(record)
    # A record may lack a field that came later.
    own = RunSettings().to_dict() | dict(settings)
    own.pop("trainer")
    trainer = dict(settings.get("trainer") or {})
    if resolved and isinstance(record.get("resolved"), Mapping):
        trainer |= record["resolved"]
    objective = record.get("objective")
    if isinstance(objective, Mapping):
        pieces = _flatten(effective(objective), "objective.")
        leaves = {name.rpartition(".")[2] for name in _flatten(objective)} | {"algorithm"}
        own = {key: value for key, value in own.items() if key not in leaves}
        trainer = {key: value for key, value in trainer.items() if key not in leaves}
    else:
        pieces = {}
    # The best checkpoint is the best of those that are saved.
    counted = _SAVES if trainer.get("load_best_model_at_end") else ""
    ordered = own | dict(sorted(trainer.items())) | pieces
    return _plain({k: v for k, v in ordered.items() if NOT_IDENTITY.get(k, counted) == counted})


def _foreign(record: Record) -> Identity:
    """Of somebody else's log, or a record made by hand: its label and all that it says besides."""
    untold = {*NOT_SETTINGS, "steps"} if record.get("kind") == "trl" else NOT_SETTINGS
    told = {key: value for key, value in record.items() if key not in untold}
    return {"label": base_label(record), **_plain(_flatten(told))}


def identities(records: Sequence[Record]) -> list[Identity]:
    """The identities of several runs on one footing, so that they can be held against each other.

    Settings as resolved are compared where every record has them, and only those that all versions
    of the trainer know or that somebody gave.
    """
    ours = [record for record in records if isinstance(record.get("settings"), Mapping)]
    if not all(isinstance(record.get("resolved"), Mapping) for record in ours):
        return [identity(record, resolved=False) for record in records]
    given = {key for record in ours for key in identity(record, resolved=False)}
    sets = [set(record["resolved"]) for record in ours]
    unshared = set().union(*sets) - (set.intersection(*sets) if sets else set()) - given
    return [
        {key: value for key, value in identity(record).items() if key not in unshared}
        for record in records
    ]


def differences(one: Record, other: Record, *, resolved: bool = True) -> list[str]:
    """Where two runs differ, in words; empty if they are one run but for the seed.

    >>> differences({"settings": {"lora": 4}}, {"settings": {"lora": 8}})
    ['lora 4, not 8']
    """
    both = identities([one, other]) if resolved else [identity(r, resolved=False)
                                                      for r in (one, other)]  # fmt: skip
    return [
        f"{key} {value_text(key, both[0].get(key))}, not {value_text(key, both[1].get(key))}"
        for key in _varying(both)
    ]


def effective(objective: Mapping[str, Any]) -> dict[str, Any]:
    """An objective without its pieces that do nothing, as plain nested dicts.

    >>> effective({"horizon": {"applies_to": "negative", "alpha": 0.0}})
    {'horizon': {'applies_to': 'none'}}
    """
    if objective.get("horizon", {}).get("alpha") == 0:
        objective = {**objective, "horizon": {**objective["horizon"], "applies_to": "none"}}
    flat = _flatten(objective)
    return _nested({k: v for k, v in flat.items() if acts(k.rpartition(".")[2], objective)})


_HORIZON = ("alpha", "normalize", "inclusive")
_KL = ("estimator", "bias_correction")
_CLIPS = {
    **dict.fromkeys(("eps_low", "eps_high"), ("ppo", "dual", "cispo")),
    "delta": ("dual",),
    **dict.fromkeys(("eps1", "eps2", "eps3", "eps4"), ("four-boundary",)),
    **dict.fromkeys(("tau_positive", "tau_negative"), ("sapo",)),
}
"""Bounds, and the clips that read them."""
_KNOWN_CLIPS = ("ppo", "dual", "cispo", "four-boundary", "sapo", "none")
_CORRECTION = ("correction_max", "correction_min")
CONDITIONAL = frozenset({*_HORIZON, *_KL, *_CLIPS, *_CORRECTION})
"""Pieces of an objective that act under some others only."""


def acts(key: str, objective: Mapping[str, Any]) -> bool:
    """Whether a piece of an objective can change anything beside the others.

    >>> acts("alpha", {"horizon": {"applies_to": "none"}})
    False
    """
    if key in _HORIZON:
        return bool(objective.get("horizon", {}).get("applies_to", "none") != "none")
    if key in _KL:
        return bool(objective.get("kl", {}).get("beta") != 0)
    if key in _CORRECTION:
        return bool(objective.get("sampling", {}).get("correction", "none") != "none")
    clip = objective.get("ratio", {}).get("clip", "ppo")
    # A clip of the user's own may read any of the bounds.
    return key not in _CLIPS or clip not in _KNOWN_CLIPS or clip in _CLIPS[key]


# What runs are called


def labels(records: Sequence[Record]) -> list[str]:
    """A label for each run, equal where and only where the identities are.

    A label is the run's own (its algorithm and what overrides it) and whatever else differs
    between the runs.

    >>> runs = [{"label": "grpo", "settings": {"lora": rank}} for rank in (4, 8, 4)]
    >>> labels(runs)
    ['grpo lora=4', 'grpo lora=8', 'grpo lora=4']
    """
    found = identities(records)
    keys = [digest(one) for one in found]
    ours = ["settings" in record for record in records]
    varying = {kind: _varying([f for f, o in zip(found, ours, strict=True) if o is kind])
               for kind in (True, False)}  # fmt: skip
    named: dict[str, str] = {}
    for record, one, key, kind in zip(records, found, keys, ours, strict=True):
        extra = [name for name in varying[kind] if not name.startswith("objective.")]
        named.setdefault(key, _label(base_label(record), one, extra if kind else []))
    for wanted in (_objective_names(varying[True]), varying[False], None):
        clashing = _clashing(named)
        for key in dict.fromkeys(keys):
            if key in clashing:
                one = found[keys.index(key)]
                more = f"#{key[:6]}" if wanted is None else _label("", one, wanted).strip()
                named[key] = f"{named[key]} {more}".strip()
    return [named[key] for key in keys]


def base_label(record: Record) -> str:
    """What a run calls itself.

    >>> base_label({"algorithm": "grpo", "overrides": {"alpha": 0.25}})
    'grpo alpha=0.25'
    """
    if record.get("label"):
        return str(record["label"])
    words = [str(record.get("algorithm") or record.get("name") or "run")]
    words += [word(key, value) for key, value in (record.get("overrides") or {}).items()]
    return " ".join(words)


def word(key: str, value: Any) -> str:
    """A setting as a label writes it.

    >>> word("learning_rate", 1e-4), word("model", "Qwen/Qwen3-4B-Base"), word("bf16", True)
    ('lr=1e-4', 'model=Qwen3-4B-Base', 'bf16=true')
    """
    name = key.rpartition(".")[2]
    return f"{SHORT.get(name, name)}={value_text(name, value)}"


def value_text(key: str, value: Any) -> str:
    """A value in few characters, on one line."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return number_text(value)
    if key == "model" and isinstance(value, str):
        value = PurePath(value).name or value
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return text if len(text) <= 32 else text[:31] + "…"


def number_text(value: float) -> str:
    """The shortest way to write a number.

    >>> [number_text(x) for x in (1e-4, 0.25, 2.0, 12345678.0)]
    ['1e-4', '0.25', '2.0', '12345678.0']
    """
    plain = repr(value)
    mantissa, _, exponent = f"{value:e}".partition("e")
    short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else plain
    exact = len(short) < len(plain.replace("e-0", "e-")) and float(short) == value
    return short if exact else re.sub(r"e([+-])0*", lambda m: "e" + m[1].strip("+"), plain)


def folder_name(words: Sequence[str], seed: int, one: Identity) -> str:
    """A name that is safe as a folder's, whatever the settings hold.

    >>> folder_name(["grpo", "lr=1e-4"], 0, {})
    'grpo-lr=1e-4-seed0'
    """
    text = "-".join(safe(part) for part in words)
    if len(text) > 100:
        text = f"{text[:90].rstrip('-.')}-{digest(one)[:6]}"
    return f"{text}-seed{seed}"


def safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "-", text).strip("-.")


def digest(one: Identity) -> str:
    """A name for an identity: equal for equal ones, on every machine.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(one, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _label(base: str, one: Identity, names: Sequence[str]) -> str:
    said = {part.partition("=")[0] for part in base.split(" ")[1:]}
    words = [word(n, one[n]) for n in names if one.get(n) is not None]
    words = [w for w in words if w.partition("=")[0] not in said]
    if len(words) > MOST_WORDS:
        words = [*words[: MOST_WORDS - 1], f"+{len(words) - MOST_WORDS + 1} more"]
    return " ".join([base, *words])


def _objective_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("objective.")]


def _clashing(named: Mapping[str, str]) -> set[str]:
    """Identities that share a label with another."""
    taken: dict[str, list[str]] = {}
    for key, label in named.items():
        taken.setdefault(label, []).append(key)
    return {key for keys in taken.values() if len(keys) > 1 for key in keys}


def _varying(found: Sequence[Identity]) -> list[str]:
    names = list(dict.fromkeys(name for one in found for name in one))
    return [n for n in names if len({_key(one.get(n)) for one in found}) > 1]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(values: Mapping[str, Any]) -> Identity:
    """As JSON gives it back, so that a record on disk equals the one in hand; None says nothing."""
    loaded: Identity = json.loads(json.dumps(dict(values), default=str))
    return {key: value for key, value in loaded.items() if value is not None}


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        group, _, leaf = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[leaf] = value
    return nested
