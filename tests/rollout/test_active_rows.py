"""What the host knows of the rows without waiting for the device."""

from __future__ import annotations

import random

import torch

from asymgrpo.rollout.native.active_rows import ActiveRows, HostCopy


def test_a_look_shows_what_was_there(device):
    source = torch.tensor([1, 0, 1], device=device)
    copy = HostCopy(source)
    source.zero_()
    assert copy.values().tolist() == [1, 0, 1]
    assert copy.values().device.type == "cpu"


def test_rows_end_by_their_limits_without_a_look():
    active = ActiveRows([3, 5, 3, 9])
    assert (active.count, active.needed) == (4, 9)
    active.advance(3)
    assert (active.count, active.needed) == (2, 6)
    assert active.compact().tolist() == [1, 3]
    assert len(active) == 2
    active.advance(2)
    assert active.compact().tolist() == [1]
    active.advance(4)
    assert (active.count, active.needed) == (0, 0)


def test_against_a_list_of_rows():
    draw = random.Random(0)
    for _ in range(50):
        limits = [draw.randint(1, 30) for _ in range(draw.randint(1, 12))]
        ends = [min(limit, draw.randint(1, 40)) for limit in limits]
        active, batch, steps = ActiveRows(limits), list(range(len(limits))), 0
        seen: set[int] = set()
        while active.count:
            assert len(active) == len(batch)
            chunk = min(4, active.needed)
            reported = [int(ends[row] > steps + chunk - 1) for row in batch]
            steps += chunk
            active.advance(chunk)
            active.observe(torch.tensor(reported))
            seen |= {row for row, alive in zip(batch, reported, strict=True) if not alive}
            left = [row for row in batch if row not in seen and limits[row] > steps]
            assert active.count == len(left)
            if left:
                assert active.needed == max(limits[row] for row in left) - steps
            if draw.random() < 0.5 and left:
                batch = [batch[place] for place in active.compact().tolist()]
                assert batch == left
        assert all(end <= steps for end in ends)
