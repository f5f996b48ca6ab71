"""Which leaves of a configuration act under it, so that none is set in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asymgrpo.objective.ratio import CLIPS

if TYPE_CHECKING:
    from asymgrpo.objective.config import ObjectiveConfig

THRESHOLDS = ("eps1", "eps2", "eps3", "eps4")
"""These count the quadrants under every clip, so they act everywhere."""


def no_effect(leaf: str, config: ObjectiveConfig) -> str | None:
    """Why `leaf` changes nothing under `config`, and what would let it act; None where it acts.

    >>> from asymgrpo.objective.config import ObjectiveConfig
    >>> no_effect("alpha", ObjectiveConfig())
    'alpha has no effect with applies_to=none; set applies_to=all or applies_to=negative'
    >>> no_effect("eps_low", ObjectiveConfig())
    """
    if leaf in ("alpha", "normalize", "inclusive"):
        return _without_horizon(leaf, config)
    if leaf in ("estimator", "bias_correction") and config.kl.beta == 0:
        return f"{leaf} has no effect with beta=0; set beta above 0"
    if leaf in ("correction_max", "correction_min") and config.sampling.correction == "none":
        return (
            f"{leaf} has no effect with correction=none; set correction=token-truncate or another"
        )
    used = CLIPS[config.ratio.clip].uses
    users = [f"clip={name}" for name, clip in CLIPS.items() if leaf in clip.uses]
    if not users or leaf in used or leaf in THRESHOLDS:
        return None
    instead = f", or {', '.join(used)} for this clip" if used else ""
    return (
        f"{leaf} has no effect with clip={config.ratio.clip}; set {' or '.join(users)}"
        f" to use it{instead}"
    )


def _without_horizon(leaf: str, config: ObjectiveConfig) -> str | None:
    horizon = config.horizon
    if horizon.applies_to == "none":
        return f"{leaf} has no effect with applies_to=none; set applies_to=all or " + (
            "applies_to=negative"
        )
    if leaf != "alpha" and horizon.alpha == 0:
        return f"{leaf} has no effect with alpha=0; set alpha above 0"
    return None
