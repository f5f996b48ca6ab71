"""A seed for every rollout of a run, from what the rollout is and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def rollout_seeds(origin: Sequence[int], first: int, count: int) -> list[int]:
    """Seeds of the rollouts `first` .. `first + count - 1` of the batch that `origin` names.

    The same in every process and after every resume; 63 bits, so that they fit a tensor.

    >>> rollout_seeds((0, 7), 0, 3)[1:] == rollout_seeds((0, 7), 1, 2)
    True
    """
    name = ":".join(map(str, origin))
    digests = (
        hashlib.blake2b(f"{name}:{index}".encode(), digest_size=8).digest()
        for index in range(first, first + count)
    )
    return [int.from_bytes(digest) >> 1 for digest in digests]
