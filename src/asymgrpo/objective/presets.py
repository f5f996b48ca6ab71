"""Names to configurations and their papers; no mathematics."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import Any

from asymgrpo.objective.activity import no_effect
from asymgrpo.objective.config import (
    AdvantageConfig,
    HorizonConfig,
    ObjectiveConfig,
    RatioConfig,
)


@dataclass(frozen=True)
class Preset:
    """A configuration under a name, what it does, and where it comes from."""

    config: ObjectiveConfig
    summary: str
    paper: str
    """An arXiv number."""


_UNSCALED = AdvantageConfig(scale="none")
_FOUR_BOUNDS = RatioConfig(clip="four-boundary")
_NEGATIVE = HorizonConfig(applies_to="negative")

ALGORITHMS: dict[str, Preset] = {
    "grpo": Preset(ObjectiveConfig(), "the baseline: one clip, mean by rollout", "2402.03300"),
    "ah-grpo": Preset(
        ObjectiveConfig(horizon=HorizonConfig(applies_to="all")),
        "discounts every rollout by the entropy it has spent",
        "2606.05434",
    ),
    "sa-ah-grpo": Preset(
        ObjectiveConfig(horizon=_NEGATIVE), "discounts failed rollouts only", "2606.05434"
    ),
    "abc-grpo": Preset(
        ObjectiveConfig(ratio=_FOUR_BOUNDS), "bounds the ratio in all four quadrants", "2601.03895"
    ),
    "sa-ah-abc-grpo": Preset(
        ObjectiveConfig(horizon=_NEGATIVE, ratio=_FOUR_BOUNDS),
        "both: failed rollouts discounted, four bounds",
        "2606.05434, 2601.03895",
    ),
    "dapo": Preset(
        ObjectiveConfig(ratio=RatioConfig(eps_high=0.28), aggregate="token-mean"),
        "a higher upper bound, mean by token",
        "2503.14476",
    ),
    "dr-grpo": Preset(
        ObjectiveConfig(advantage=_UNSCALED, aggregate="fixed-length"),
        "no division by the deviation or the length",
        "2503.20783",
    ),
    "gspo": Preset(
        ObjectiveConfig(ratio=RatioConfig(level="sequence", eps_low=3e-4, eps_high=4e-4)),
        "one ratio a rollout",
        "2507.18071",
    ),
    "cispo": Preset(
        ObjectiveConfig(
            ratio=RatioConfig(clip="cispo", eps_low=1.0, eps_high=4.0), aggregate="token-mean"
        ),
        "a capped, detached ratio; every token keeps a gradient",
        "2506.13585",
    ),
    "sapo": Preset(
        ObjectiveConfig(ratio=RatioConfig(clip="sapo")),
        "a smooth gate in place of the clip",
        "2511.20347",
    ),
    "dual-clip-grpo": Preset(
        ObjectiveConfig(ratio=RatioConfig(clip="dual")),
        "caps the ratio of failed rollouts as well",
        "2505.07291",
    ),
    "rloo": Preset(
        ObjectiveConfig(
            advantage=AdvantageConfig(baseline="leave-one-out", scale="none"),
            ratio=RatioConfig(clip="none"),
            aggregate="fixed-length",
        ),
        "REINFORCE with the mean of the other rollouts as baseline",
        "2402.14740",
    ),
}


def _groups() -> dict[str, str | None]:
    """Leaf name to the group that holds it; None for a leaf at the top."""
    leaves: dict[str, str | None] = {}
    for entry in fields(ObjectiveConfig):
        value = getattr(ObjectiveConfig(), entry.name)
        if is_dataclass(value):
            leaves |= {leaf.name: entry.name for leaf in fields(value)}
        else:
            leaves[entry.name] = None
    return leaves


OVERRIDES: dict[str, str | None] = _groups()
"""Every override key, and the group of the configuration that it lives in."""


def algorithm(name: str, **overrides: Any) -> ObjectiveConfig:
    """The configuration called `name`, with leaves replaced by field name.

    An override that would change nothing is an error, whatever its value.

    >>> algorithm("sa-ah-grpo", alpha=0.25).horizon
    HorizonConfig(alpha=0.25, applies_to='negative', normalize='vocab', inclusive=True)
    >>> algorithm("grpo", alhpa=0.25)
    Traceback (most recent call last):
    ...
    ValueError: unknown override 'alhpa'; did you mean alpha? Valid: aggregate, alpha, ...
    """
    config = overridden(name, overrides)
    for key in overrides:
        reason = no_effect(key, config)
        if reason is not None:
            raise ValueError(f"{reason} ({name})")
    return config


def acting(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the overrides that change something under the algorithm `name`.

    For a comparison, whose settings are for all of its algorithms, each as far as it has a use.

    >>> acting("grpo", {"alpha": 0.25, "eps_low": 0.1})
    {'eps_low': 0.1}
    """
    config = overridden(name, overrides)
    return {key: value for key, value in overrides.items() if no_effect(key, config) is None}


def overridden(name: str, overrides: Mapping[str, Any]) -> ObjectiveConfig:
    """The configuration called `name` with leaves replaced, whether they act or not.

    >>> overridden("grpo", {"alpha": 0.25}).horizon.alpha
    0.25
    """
    if name not in ALGORITHMS:
        raise ValueError(_unknown("algorithm", name, ALGORITHMS))
    config = ALGORITHMS[name].config
    changes: dict[str | None, dict[str, Any]] = {}
    for key, value in overrides.items():
        if key not in OVERRIDES:
            raise ValueError(_unknown("override", key, sorted(OVERRIDES)))
        group = OVERRIDES[key]
        current = getattr(config if group is None else getattr(config, group), key)
        changes.setdefault(group, {})[key] = _typed(key, value, current)
    top = changes.pop(None, {})
    nested = {str(g): replace(getattr(config, str(g)), **part) for g, part in changes.items()}
    return replace(config, **top, **nested)


def _typed(key: str, value: Any, current: Any) -> Any:
    if isinstance(current, float) and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)  # numpy's numbers are welcome, as a sweep may use them
    if type(value) is not type(current):
        wanted = {float: "a number", str: "a word", bool: "true or false"}[type(current)]
        raise ValueError(f"{key} must be {wanted}, got {value!r}")
    return value


def _unknown(kind: str, name: str, valid: Any) -> str:
    near = difflib.get_close_matches(name, list(valid), n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}Valid: {', '.join(valid)}"


def differences(config: ObjectiveConfig) -> str:
    """The leaves in which `config` is unlike GRPO, as overrides would say them.

    >>> differences(ALGORITHMS["dapo"].config)
    'eps_high=0.28 aggregate=token-mean'
    """
    grpo = ObjectiveConfig()
    words = []
    for leaf, group in OVERRIDES.items():
        ours, theirs = (
            getattr(c if group is None else getattr(c, group), leaf) for c in (config, grpo)
        )
        if ours != theirs:
            words.append(f"{leaf}={ours}")
    return " ".join(words)
