"""In which types a run trains, decided once from the weights and from `bf16` and `fp16`.

- The compute type is what `bf16` or `fp16` name, else the type of the weights themselves.
- Frozen weights (the base under an adapter) are held in the compute type.
- Trained weights in bfloat16 stay so, and the optimiser owns float32 masters of them: at a usual
  learning rate nearly all of an update is lost where it is added to a bfloat16 weight.
- Trained weights in float32 stay so; products are cast (autocast), and rollouts run on a copy in
  the compute type.
- Trained weights in float16, or in any narrow type under `fp16`, are widened to float32: the loss
  scaler works on float32 gradients alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from asymgrpo.errors import UserError

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The types of one run, by name as torch writes them."""

    compute: str
    """Of matrix products, in rollouts and in the update."""
    trained: str
    """Of the trained weights that the model holds."""
    frozen: str | None
    """Of the weights that are not trained; None where all are."""
    masters: bool
    """Whether the optimiser owns float32 masters of the trained weights."""
    rollouts: str
    """Of the weights that rollouts run on."""

    @property
    def rollout_copy(self) -> bool:
        """Whether rollouts need a copy of the trained weights."""
        held = self.frozen or self.trained
        return self.rollouts != held

    def __str__(self) -> str:
        if self.frozen is not None:
            held = f"frozen weights {self.frozen}, trained weights {self.trained}"
        else:
            held = f"weights {self.trained}"
        parts = [held + (" with float32 masters" if self.masters else "")]
        if self.compute != (self.frozen or self.trained):
            parts.append(f"{self.compute} autocast")
        if self.rollout_copy:
            parts.append(f"rollouts on a {self.rollouts} copy")
        return ", ".join(parts)

    def record(self) -> dict[str, str | bool | None]:
        """As plain values, for the run's record."""
        return asdict(self)


def decide_precision(
    trained: Iterable[torch.Tensor],
    frozen: Iterable[torch.Tensor] = (),
    *,
    bf16: bool = False,
    fp16: bool = False,
    rollouts: str = "auto",
) -> Precision:
    """The precision of a run from its trained and frozen parameters.

    `rollouts` names the type that rollouts run in, "auto" the compute type.

    >>> weights = [torch.ones(2, dtype=torch.bfloat16)]
    >>> print(decide_precision(weights, bf16=True))
    weights bfloat16 with float32 masters
    >>> print(decide_precision([torch.ones(2)], bf16=True))
    weights float32, bfloat16 autocast, rollouts on a bfloat16 copy
    >>> print(decide_precision([torch.ones(2)], weights, bf16=True))
    frozen weights bfloat16, trained weights float32
    """
    own, base = _main_dtype(trained), _main_dtype(frozen)
    if own is None:
        raise UserError("no weight of the model is trained; set requires_grad, or pass an adapter")
    stored = base or own
    if stored == torch.float16 and not (bf16 or fp16):
        raise UserError(
            "the weights are float16, in which gradients vanish: set bf16=true or fp16=true, or "
            "load them as float32"
        )
    compute = torch.bfloat16 if bf16 else torch.float16 if fp16 else stored
    widened = own == torch.float16 or (own in NARROW and compute == torch.float16)
    own = torch.float32 if widened else own
    held = compute if base is not None else own
    return Precision(
        compute=_name(compute),
        trained=_name(own),
        frozen=None if base is None else _name(held),
        masters=own in NARROW,
        rollouts=_name(compute) if rollouts == "auto" else rollouts,
    )


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Give the model's parameters, in place, the types that `precision` states.

    >>> layer = nn.Linear(2, 2)
    >>> layer.bias.requires_grad_(False).dtype
    torch.float32
    >>> apply_precision(layer, decide_precision([layer.weight], [layer.bias], bf16=True))
    >>> layer.weight.dtype, layer.bias.dtype
    (torch.float32, torch.bfloat16)
    """
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue  # quantized
        if not parameter.requires_grad:
            assert precision.frozen is not None
            parameter.data = parameter.data.to(_dtype(precision.frozen))
        elif parameter.dtype in NARROW:
            parameter.data = parameter.data.to(_dtype(precision.trained))


def model_precision(
    model: nn.Module, *, bf16: bool, fp16: bool, rollouts: str = "auto"
) -> Precision:
    """`decide_precision` for a model's parameters.

    >>> print(model_precision(nn.Linear(2, 2), bf16=False, fp16=False))
    weights float32
    """
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    return decide_precision(
        [p for p in parameters if p.requires_grad],
        [p for p in parameters if not p.requires_grad],
        bf16=bf16,
        fp16=fp16,
        rollouts=rollouts,
    )


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The type that most of the elements have."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
