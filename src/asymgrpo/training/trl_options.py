"""TRL's names for what an objective decides, as overrides of its pieces.

Every option keeps TRL's meaning: `loss_type` says how tokens are added up, and under cispo and sapo
how they are clipped; `epsilon` is both bounds unless `epsilon_high` is the upper one. Imports
nothing of TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asymgrpo.objective.config import ObjectiveConfig
from asymgrpo.objective.presets import algorithm, overridden

LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregate": "sequence-mean"},
    "dapo": {"aggregate": "token-mean"},
    "dr_grpo": {"aggregate": "fixed-length"},
    "bnpo": {"aggregate": "local-token-mean"},
    "luspo": {"aggregate": "sequence-sum"},
    "sapo": {"aggregate": "sequence-mean", "clip": "sapo"},
    "cispo": {"aggregate": "token-mean", "clip": "cispo", "eps_low": 1.0},
}
"""TRL's losses as pieces of an objective. CISPO's ratio has an upper bound only."""

SAME = {
    "importance_sampling_level": "level",
    "scale_rewards": "scale",
    "top_entropy_quantile": "top_entropy",
    "sapo_temperature_pos": "tau_positive",
    "sapo_temperature_neg": "tau_negative",
}
"""TRL's fields that mean a leaf of ours, value for value."""

FIELDS = ("loss_type", "epsilon", "epsilon_high", *SAME)
TRL_EPSILON = 0.2


def loss_type_of(config: ObjectiveConfig) -> str:
    """TRL's name for the way in which an objective clips and adds up.

    >>> loss_type_of(algorithm("dapo"))
    'dapo'
    """
    by_clip = {pieces["clip"]: name for name, pieces in LOSS_TYPES.items() if "clip" in pieces}
    by_sum = {
        pieces["aggregate"]: name for name, pieces in LOSS_TYPES.items() if "clip" not in pieces
    }
    return by_clip.get(config.ratio.clip) or by_sum[config.aggregate]


def implied(config: ObjectiveConfig) -> dict[str, Any]:
    """What TRL's fields are under an objective.

    >>> implied(algorithm("cispo"))["epsilon_high"]
    5.0
    """
    ratio = config.ratio
    # TRL's cispo takes the bound itself, ours its distance from 1, as for every other clip.
    upper = 1 + ratio.eps_high if ratio.clip == "cispo" else ratio.eps_high
    return {
        "loss_type": loss_type_of(config),
        "epsilon": ratio.eps_low,
        "epsilon_high": upper,
        "importance_sampling_level": ratio.level,
        "scale_rewards": config.advantage.scale,
        "top_entropy_quantile": config.top_entropy,
        "sapo_temperature_pos": ratio.tau_positive,
        "sapo_temperature_neg": ratio.tau_negative,
    }


def translated(name: str, own: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of the algorithm `name` that TRL's options stand for, beside `own` overrides.

    `said` holds TRL's fields that are not None. One that says what the objective is anyway stands
    for nothing; one that contradicts `own` or the algorithm's own loss is a ValueError.

    >>> translated("grpo", {}, {"loss_type": "dapo", "epsilon": 0.1})
    {'aggregate': 'token-mean', 'eps_low': 0.1, 'eps_high': 0.1}
    """
    base = overridden(name, own)
    now = implied(base)
    told = {field: value for field, value in said.items() if value != now.get(field)}
    found: dict[str, Any] = {}
    if "loss_type" in told:
        found |= _loss_pieces(name, base, told["loss_type"], said)
    if "epsilon" in told and found.get("clip") != "cispo":
        found |= _both_bounds(name, base, said)
    if "epsilon_high" in told and found.get("clip") != "cispo":
        below = 1.0 if base.ratio.clip == "cispo" else 0.0
        found["eps_high"] = said["epsilon_high"] - below
    found |= {SAME[field]: value for field, value in told.items() if field in SAME}
    for key, value in found.items():
        if key in own and own[key] != value:
            raise ValueError(f"{_names(key, told)} and {key}={own[key]!r} differ; set one of them")
    try:
        algorithm(name, **{**own, **found})
    except ValueError as error:
        names = _names("", told)
        raise ValueError(f"{names}: {error}" if names else str(error)) from None
    return found


def _loss_pieces(
    name: str, base: ObjectiveConfig, loss_type: str, said: Mapping[str, Any]
) -> dict[str, Any]:
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={loss_type!r} is none of our objectives; choose from "
            f"{', '.join(LOSS_TYPES)}, set algorithm (gspo is the nearest to a loss by sequence), "
            "or train it with trl.GRPOTrainer"
        )
    pieces = dict(LOSS_TYPES[loss_type])
    current = loss_type_of(base)
    if current != "grpo" or ("clip" in pieces and base.ratio.clip != "ppo"):
        raise ValueError(
            f"loss_type={loss_type!r} contradicts the objective {name!r}, whose clip is "
            f"{base.ratio.clip} and whose aggregate is {base.aggregate}; leave loss_type out, or "
            "choose by algorithm, clip and aggregate alone"
        )
    if loss_type == "cispo":
        bound = said.get("epsilon_high", said.get("epsilon", TRL_EPSILON))
        pieces["eps_high"] = bound - 1
    return pieces


def _both_bounds(name: str, base: ObjectiveConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    epsilon = said["epsilon"]
    if "epsilon_high" in said:
        return {"eps_low": epsilon}
    if base.ratio.eps_low != base.ratio.eps_high:
        raise ValueError(
            f"epsilon={epsilon!r} is both bounds in TRL, and those of {name!r} here are "
            f"{base.ratio.eps_low:g} and {base.ratio.eps_high:g}; set eps_low and eps_high instead"
        )
    return {"eps_low": epsilon, "eps_high": epsilon}


def _names(key: str, told: Mapping[str, Any]) -> str:
    """TRL's fields as they were set; those that mean `key` where it is given."""
    meaning = {"eps_low": ("epsilon",), "eps_high": ("epsilon_high", "epsilon")}
    meaning |= {"clip": ("loss_type",), "aggregate": ("loss_type",)}
    meaning |= {ours: (theirs,) for theirs, ours in SAME.items()}
    wanted = meaning.get(key, FIELDS)
    return ", ".join(f"{field}={told[field]!r}" for field in wanted if field in told)
