"""Estimates of the KL divergence to a reference, token by token (Schulman's k1, k2, k3)."""

from __future__ import annotations

from torch import Tensor

from asymgrpo.objective.ratio import LOG_RATIO_LIMIT


def k1(log_ratio: Tensor) -> Tensor:
    """`log pi - log ref`: unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, never negative."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """`ref / pi - 1 - log(ref / pi)`: unbiased and never negative; GRPO's."""
    return log_ratio.exp() - log_ratio - 1


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_divergence(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """`logps` and `ref_logps`, both [B, T], to the estimate [B, T].

    >>> import torch
    >>> logps = torch.tensor([[-1.0]])
    >>> [round(kl_divergence(logps, logps - 1, name).item(), 3) for name in ("k1", "k2", "k3")]
    [1.0, 0.5, 0.368]
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if logps.shape != ref_logps.shape:
        raise ValueError(
            f"logps and ref_logps differ in shape: {tuple(logps.shape)}, {tuple(ref_logps.shape)}"
        )
    log_ratio = (ref_logps - logps).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ESTIMATORS[estimator](log_ratio)
