"""What processes that train together tell each other; alone, a process hears itself."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")


def together() -> bool:
    """Whether several processes train one model.

    >>> together()
    False
    """
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def from_main(value: Value, device: Any = None) -> Value:
    """What the main process has as `value`, in every process; plain Python objects only.

    >>> from_main({"step": 3})
    {'step': 3}
    """
    if not together():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0, device=device)
    return box[0]


def any_process(flag: bool, device: Any = None) -> bool:
    """Whether `flag` is set in any process: the same answer in all of them.

    >>> any_process(True)
    True
    """
    if not together():
        return flag
    number = torch.tensor(int(flag), device=device)
    distributed.all_reduce(number, op=distributed.ReduceOp.MAX)
    return bool(number.item())


def wait_for_all() -> None:
    """Return once every process has come here.

    >>> wait_for_all()
    """
    if together():
        distributed.barrier()
