"""Every piece of an objective once more, as plain loops over Python's float64.

Written from the equations, with `min` and `clip` where the papers write them and derivatives taken
by hand, so that it shares neither code nor autograd with the package. A rollout is the list of its
own tokens: there is no padding and no mask to get wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Rollout:
    """One completion, and the gradient and trace that `evaluate` fills in."""

    advantage: float
    logps: list[float]
    old_logps: list[float]
    entropies: list[float]
    ref_logps: list[float] | None = None
    sampling_weights: list[float] | None = None
    sampling_logps: list[float] | None = None


@dataclass
class Settings:
    """The leaves of a configuration, under the names of its override keys."""

    alpha: float = 0.5
    applies_to: str = "none"
    normalize: str = "vocab"
    inclusive: bool = True
    level: str = "token"
    clip: str = "ppo"
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float = 4.0
    eps1: float = 0.2
    eps2: float = 0.2
    eps3: float = 0.2
    eps4: float = 0.2
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    beta: float = 0.0
    estimator: str = "k3"
    bias_correction: bool = False
    aggregate: str = "sequence-mean"
    entropy_bonus: float = 0.0
    top_entropy: float = 1.0
    correction: str = "none"
    correction_max: float = 2.0
    correction_min: float = 0.0


@dataclass
class Result:
    """A loss, its derivatives, and what it was made of; one inner list a rollout."""

    loss: float
    logps_gradient: list[list[float]]
    entropies_gradient: list[list[float]]
    metrics: dict[str, float]
    trace: dict[str, list[list[float]]] = field(default_factory=dict)


def advantages(rewards: list[float], group_size: int, baseline: str, scale: str) -> list[float]:
    """NaN marks a rollout without a score: outside of every mean, and of advantage 0."""
    deviation = {}
    for start in range(0, len(rewards), group_size):
        group = [r for r in rewards[start : start + group_size] if not math.isnan(r)]
        deviation[start] = sample_deviation(group)
    if scale == "batch":
        whole = sample_deviation([r for r in rewards if not math.isnan(r)])
        deviation = dict.fromkeys(deviation, whole)
    result = []
    for index, reward in enumerate(rewards):
        start = index - index % group_size
        group = range(start, start + group_size)
        if math.isnan(reward):
            result.append(0.0)
            continue
        others = [rewards[i] for i in group if not math.isnan(rewards[i])]
        if baseline == "leave-one-out":
            others = [rewards[i] for i in group if i != index and not math.isnan(rewards[i])]
        centred = sum(reward - other for other in others) / len(others) if others else 0.0
        result.append(centred if scale == "none" else centred / (deviation[start] + 1e-4))
    return result


def sample_deviation(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def discounts(
    entropies: list[float], alpha: float, vocab_size: int, normalize: str, inclusive: bool
) -> list[float]:
    """D_t = exp(-alpha * sum_{k<=t} H_k / log V)."""
    unit = math.log(vocab_size) if normalize == "vocab" else 1.0
    result = []
    for t in range(len(entropies)):
        counted = entropies[: t + 1] if inclusive else entropies[:t]
        result.append(math.exp(-alpha * sum(h / unit for h in counted)))
    return result


def ratios(logps: list[float], old_logps: list[float], level: str) -> list[float]:
    """exp(logp - old) of each token, or of their mean over the rollout."""
    logs = [new - old for new, old in zip(logps, old_logps, strict=True)]
    if level == "sequence" and logs:
        logs = [sum(logs) / len(logs)] * len(logs)
    return [math.exp(value) for value in logs]


def corrections(rollout: Rollout, s: Settings) -> list[float]:
    """The weight of each token for what its sampler's log-prob differs by."""
    n = len(rollout.logps)
    if s.correction == "none":
        return [1.0] * n
    weights = []
    for old, drawn in zip(rollout.old_logps, rollout.sampling_logps, strict=True):
        weights.append(1.0 if math.isnan(drawn) else math.exp(old - drawn))
    level, how = s.correction.split("-")
    if level == "sequence":
        weights = [math.prod(weights)] * n
    low, high = s.correction_min, s.correction_max
    if how == "truncate":
        return [min(max(weight, low), high) for weight in weights]
    return [weight if low <= weight <= high else 0.0 for weight in weights]


def clip(value: float, low: float, high: float) -> tuple[float, float]:
    """The clipped value and its derivative."""
    return min(max(value, low), high), 1.0 if low <= value <= high else 0.0


def surrogate(s: Settings, r: float, a: float, logp: float) -> tuple[float, float, float]:
    """The value, and its derivatives by the ratio and by the log-probability itself."""
    if s.clip == "none":
        return r * a, a, 0.0
    if s.clip in ("ppo", "dual"):
        plain, slope = r, 1.0
        if s.clip == "dual" and a < 0:
            plain, slope = clip(r, -math.inf, s.delta)
        clipped, clipped_slope = clip(r, 1 - s.eps_low, 1 + s.eps_high)
        if plain * a <= clipped * a:
            return plain * a, slope * a, 0.0
        return clipped * a, clipped_slope * a, 0.0
    if s.clip == "four-boundary":
        low, high = (1 - s.eps2, 1 + s.eps1) if a > 0 else (1 - s.eps4, 1 + s.eps3)
        clipped, slope = clip(r, low, high)
        return clipped * a, slope * a, 0.0
    if s.clip == "cispo":
        clipped, _ = clip(r, 1 - s.eps_low, 1 + s.eps_high)
        return clipped * a * logp, 0.0, clipped * a
    assert s.clip == "sapo"
    tau = s.tau_positive if a > 0 else s.tau_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 / tau * gate * a, 4 * gate * (1 - gate) * a, 0.0


def outside(s: Settings, r: float, a: float) -> bool:
    """Whether the ratio lies where its clip holds it."""
    if s.clip in ("ppo", "dual"):
        high, low = a > 0 and r > 1 + s.eps_high, a <= 0 and r < 1 - s.eps_low
        return high or low or (s.clip == "dual" and a <= 0 and r > s.delta)
    if s.clip == "four-boundary":
        return not (1 - s.eps2 <= r <= 1 + s.eps1 if a > 0 else 1 - s.eps4 <= r <= 1 + s.eps3)
    if s.clip == "cispo":
        return not 1 - s.eps_low <= r <= 1 + s.eps_high
    return False


def quadrant(s: Settings, r: float, a: float) -> int:
    if a > 0:
        return 1 if r > 1 + s.eps1 else 2 if r < 1 - s.eps2 else 0
    if a < 0:
        return 3 if r < 1 - s.eps4 else 4 if r > 1 + s.eps3 else 0
    return 0


def kl(estimator: str, logp: float, ref_logp: float) -> tuple[float, float]:
    """The estimate and its derivative by logp."""
    if estimator == "k1":
        return logp - ref_logp, 1.0
    if estimator == "k2":
        return (logp - ref_logp) ** 2 / 2, logp - ref_logp
    quotient = math.exp(ref_logp - logp)
    return quotient - 1 - (ref_logp - logp), 1 - quotient


def entropy_threshold(entropies: list[float], fraction: float) -> float:
    """The (1 - fraction) quantile, linear between neighbours."""
    ordered = sorted(entropies)
    if not ordered:
        return math.inf
    position = (1 - fraction) * (len(ordered) - 1)
    below = int(position)
    if below + 1 == len(ordered):
        return ordered[below]
    return ordered[below] + (position - below) * (ordered[below + 1] - ordered[below])


def shares(lengths: list[int], aggregate: str, max_length: int) -> list[float]:
    """What one token's loss counts in the scalar, by rollout."""
    rollouts = sum(1 for n in lengths if n) or 1
    if aggregate == "sequence-mean":
        return [1 / (n * rollouts) if n else 0.0 for n in lengths]
    if aggregate in ("token-mean", "local-token-mean"):  # unlike only in a slice of a batch
        return [1 / (sum(lengths) or 1)] * len(lengths)
    if aggregate == "sequence-sum":
        return [1 / rollouts] * len(lengths)
    return [1 / (rollouts * max_length)] * len(lengths)


def evaluate(rollouts: list[Rollout], s: Settings, *, vocab_size: int, max_length: int) -> Result:
    """Loss, gradients, metrics and trace of a batch."""
    threshold = -math.inf
    if s.top_entropy < 1:
        every = [h for rollout in rollouts for h in rollout.entropies]
        threshold = entropy_threshold(every, s.top_entropy)
    share = shares([len(rollout.logps) for rollout in rollouts], s.aggregate, max_length)
    kept = [[h >= threshold for h in rollout.entropies] for rollout in rollouts]
    acting = sum(map(sum, kept))
    loss = 0.0
    gradient, entropies_gradient, columns = [], [], []
    for rollout, weight, keep in zip(rollouts, share, kept, strict=True):
        part = one_rollout(rollout, s, keep, vocab_size)
        columns.append(part)
        loss += weight * sum(part["loss"])
        gradient.append([weight * slope for slope in part["slope"]])
        bonus = s.entropy_bonus / acting if acting else 0.0
        loss -= sum(bonus * h for h, k in zip(rollout.entropies, keep, strict=True) if k)
        entropies_gradient.append([-bonus if k else 0.0 for k in keep])
    names = ("weight", "discount", "ratio", "surrogate", "quadrant", "clipped")
    trace = {name: [part[name] for part in columns] for name in names}
    return Result(loss, gradient, entropies_gradient, metrics(rollouts, columns, s), trace)


def one_rollout(
    rollout: Rollout, s: Settings, keep: list[bool], vocab_size: int
) -> dict[str, list[float]]:
    """Columns over its tokens: `loss` before aggregation, `slope` its sum's derivative by logp."""
    a, n = rollout.advantage, len(rollout.logps)
    discount = discounts(rollout.entropies, s.alpha, vocab_size, s.normalize, s.inclusive)
    if not (s.applies_to == "all" or (s.applies_to == "negative" and a < 0)):
        discount = [1.0] * n
    ratio = ratios(rollout.logps, rollout.old_logps, s.level)
    names = ("loss", "slope", "weight", "surrogate", "undiscounted", "kl", "quadrant", "clipped")
    out: dict[str, list[float]] = {name: [0.0] * n for name in names}
    out |= {"ratio": ratio, "discount": discount}
    correction = corrections(rollout, s)
    for t in range(n):
        r, logp = ratio[t], rollout.logps[t]
        factor = (rollout.sampling_weights[t] if rollout.sampling_weights else 1.0) * keep[t]
        factor *= correction[t]
        value, by_ratio, by_logp = surrogate(s, r, a, logp)
        out["undiscounted"][t] = value * factor
        out["surrogate"][t] = value * factor * discount[t]
        out["quadrant"][t], out["clipped"][t] = quadrant(s, r, a), outside(s, r, a)
        weight = [0.0] * n
        spread_ratio_slope(weight, t, by_ratio * r * factor * discount[t], s.level)
        weight[t] += by_logp * factor * discount[t]
        pull = [0.0] * n
        if s.beta:
            estimate, slope = kl(s.estimator, logp, rollout.ref_logps[t])
            if s.bias_correction:
                spread_ratio_slope(pull, t, estimate * r, s.level)
                estimate, slope = estimate * r, slope * r
            pull[t] += slope
            out["kl"][t] = estimate
        out["loss"][t] = s.beta * out["kl"][t] - out["surrogate"][t]
        for j in range(n):
            out["weight"][j] += weight[j]
            out["slope"][j] += s.beta * pull[j] - weight[j]
    return out


def spread_ratio_slope(slopes: list[float], t: int, slope: float, level: str) -> None:
    """d r / d logp = r for its own token, or r / n for each token of the rollout."""
    if level == "token":
        slopes[t] += slope
    else:
        for j in range(len(slopes)):
            slopes[j] += slope / len(slopes)


def metrics(
    rollouts: list[Rollout], columns: list[dict[str, list[float]]], s: Settings
) -> dict[str, float]:
    """By name; one that nothing was measured for is absent."""
    pairs = list(zip(rollouts, columns, strict=True))

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def entropy(belongs) -> float | None:
        return mean(
            [h for rollout in rollouts if belongs(rollout.advantage) for h in rollout.entropies]
        )

    def discounted(rollout: Rollout) -> bool:
        chosen = s.applies_to == "all" or (s.applies_to == "negative" and rollout.advantage < 0)
        return chosen and s.alpha > 0 and bool(rollout.logps)

    tokens = [
        (column["ratio"][t], column["quadrant"][t], column["kl"][t])
        for _, column in pairs
        for t in range(len(column["ratio"]))
    ]
    failed = [column for rollout, column in pairs if rollout.advantage < 0]
    horizon = s.alpha > 0 and s.applies_to != "none"
    mass = sum(abs(v) for column in failed for v in column["undiscounted"])
    left = sum(abs(v) for column in failed for v in column["surrogate"])
    named = {
        "entropy/mean": entropy(lambda a: True),
        "entropy/positive": entropy(lambda a: a > 0),
        "entropy/negative": entropy(lambda a: a < 0),
        "horizon/effective": mean(
            [mean(column["discount"]) for rollout, column in pairs if discounted(rollout)]
        ),
        "horizon/removed": (mass - left) / mass if mass and horizon else None,
        **{f"clip/q{q}": mean([float(k == q) for _, k, _ in tokens]) for q in (1, 2, 3, 4)},
        "ratio/mean": mean([r for r, _, _ in tokens]),
        "ratio/max": max((r for r, _, _ in tokens), default=None),
        "kl/mean": mean([value for _, _, value in tokens]) if s.beta else None,
    }
    return {name: value for name, value in named.items() if value is not None}
