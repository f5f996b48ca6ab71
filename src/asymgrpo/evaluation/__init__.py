"""How good a policy is: pass@k, avg@k, maj@k and greedy, with intervals over problems. No torch."""

from asymgrpo.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k
from asymgrpo.evaluation.evaluate import evaluate_policy, summarize
from asymgrpo.evaluation.intervals import Estimate, bootstrap_mean

__all__ = [
    "Estimate",
    "avg_at_k",
    "bootstrap_mean",
    "evaluate_policy",
    "maj_at_k",
    "pass_at_k",
    "summarize",
]
