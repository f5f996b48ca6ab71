"""An objective as frozen records, each checked at construction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from asymgrpo.objective.advantage import BASELINES, SCALES
from asymgrpo.objective.aggregate import AGGREGATES
from asymgrpo.objective.correction import CORRECTIONS
from asymgrpo.objective.horizon import APPLIES_TO, NORMALIZATIONS
from asymgrpo.objective.kl import ESTIMATORS
from asymgrpo.objective.ratio import CLIPS, LEVELS


def _one_of(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _at_least(name: str, value: float, least: float = 0.0) -> None:
    if not value >= least:  # also refuses NaN
        raise ValueError(f"{name} must be at least {least:g}, got {value}")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


@dataclass(frozen=True)
class AdvantageConfig:
    """Rewards to advantages."""

    baseline: str = "mean"
    """mean | leave-one-out"""
    scale: str = "group"
    """Whose standard deviation it is divided by: group | batch | none"""

    def __post_init__(self) -> None:
        _one_of("baseline", self.baseline, BASELINES)
        _one_of("scale", self.scale, SCALES)


@dataclass(frozen=True)
class HorizonConfig:
    """The entropy discount."""

    alpha: float = 0.5
    """How fast the weight falls with the entropy spent; 0 is no discount."""
    applies_to: str = "none"
    """Which rollouts: none | all (AH-GRPO) | negative (SA-AH-GRPO)"""
    normalize: str = "vocab"
    """Entropy in units of log V (vocab) or raw nats (none)."""
    inclusive: bool = True
    """Whether a token's own entropy counts towards its discount."""

    def __post_init__(self) -> None:
        _at_least("alpha", self.alpha)
        _finite("alpha", self.alpha)
        _one_of("applies_to", self.applies_to, APPLIES_TO)
        _one_of("normalize", self.normalize, NORMALIZATIONS)

    @property
    def active(self) -> bool:
        return self.applies_to != "none" and self.alpha > 0


@dataclass(frozen=True)
class RatioConfig:
    """The importance ratio and its bounds."""

    level: str = "token"
    """token | sequence (GSPO)"""
    clip: str = "ppo"
    """ppo | dual | four-boundary | cispo | sapo | none"""
    eps_low: float = 0.2
    """ppo, dual, cispo: the lower bound is 1 - eps_low."""
    eps_high: float = 0.2
    """ppo, dual, cispo: the upper bound is 1 + eps_high; under cispo it may lie below 1."""
    delta: float = 4.0
    """dual: the cap of the ratio where A < 0, above 1 + eps_high."""
    eps1: float = 0.2
    """four-boundary, and the threshold of quadrant 1: A > 0, r > 1 + eps1."""
    eps2: float = 0.2
    """Quadrant 2: A > 0, r < 1 - eps2."""
    eps3: float = 0.2
    """Quadrant 4: A < 0, r > 1 + eps3."""
    eps4: float = 0.2
    """Quadrant 3: A < 0, r < 1 - eps4."""
    tau_positive: float = 1.0
    """sapo: the gate's temperature where A > 0."""
    tau_negative: float = 1.05
    """sapo: the gate's temperature where A <= 0."""

    def __post_init__(self) -> None:
        _one_of("level", self.level, LEVELS)
        _one_of("clip", self.clip, CLIPS)
        for name in ("eps_low", "eps1", "eps2", "eps3", "eps4"):
            _at_least(name, getattr(self, name))
        # CISPO's cap may lie below 1, where TRL's default has it; other upper bounds may not.
        _at_least("eps_high", self.eps_high, -min(self.eps_low, 1.0) if self.clip == "cispo" else 0)
        for name in ("tau_positive", "tau_negative"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.clip == "dual" and not self.delta > 1 + self.eps_high:
            raise ValueError(
                f"delta must be above 1 + eps_high = {1 + self.eps_high:g}, got {self.delta}"
            )


@dataclass(frozen=True)
class KLConfig:
    """The pull towards a reference model."""

    beta: float = 0.0
    """Its weight; 0 needs no reference."""
    estimator: str = "k3"
    """k1 | k2 | k3"""
    bias_correction: bool = False
    """Multiply the estimate by the importance ratio, for tokens sampled off-policy."""

    def __post_init__(self) -> None:
        _at_least("beta", self.beta)
        _finite("beta", self.beta)
        _one_of("estimator", self.estimator, ESTIMATORS)


@dataclass(frozen=True)
class SamplingConfig:
    """Weights for what the sampling engine's log-probs differ by."""

    correction: str = "none"
    """none | token-truncate (TIS) | sequence-truncate | token-mask (IcePop) | sequence-mask"""
    correction_max: float = 2.0
    """The largest weight: larger ones are cut to it (truncate) or to 0 (mask)."""
    correction_min: float = 0.0
    """The smallest weight: smaller ones are raised to it (truncate) or cut to 0 (mask)."""

    def __post_init__(self) -> None:
        _one_of("correction", self.correction, CORRECTIONS)
        _at_least("correction_min", self.correction_min)
        _at_least("correction_max", self.correction_max, self.correction_min)


@dataclass(frozen=True)
class ObjectiveConfig:
    """An objective, piece by piece. The defaults are GRPO's.

    >>> ObjectiveConfig(horizon=HorizonConfig(applies_to="negative")).horizon.alpha
    0.5
    >>> ObjectiveConfig(aggregate="median")
    Traceback (most recent call last):
    ...
    ValueError: aggregate must be one of sequence-mean, token-mean, ... got 'median'
    """

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    horizon: HorizonConfig = field(default_factory=HorizonConfig)
    ratio: RatioConfig = field(default_factory=RatioConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    aggregate: str = "sequence-mean"
    """sequence-mean | token-mean | fixed-length | local-token-mean | sequence-sum"""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, added to the objective."""
    top_entropy: float = 1.0
    """The share of tokens, those of highest entropy, that the surrogate keeps."""

    def __post_init__(self) -> None:
        _one_of("aggregate", self.aggregate, AGGREGATES)
        _finite("entropy_bonus", self.entropy_bonus)
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy must be in (0, 1], got {self.top_entropy}")
