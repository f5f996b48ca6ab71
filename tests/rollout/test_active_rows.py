"""What the host knows of the rows without waiting for the device."""

from __future__ import annotations

import random

import torch

from asymgrpo.rollout.native.active_rows import Living, Look


def test_a_look_shows_what_was_there(device):
    source = torch.tensor([1, 0, 1], device=device)
    look = Look(source)
    source.zero_()
    assert look.values().tolist() == [1, 0, 1]
    assert look.values().device.type == "cpu"


def test_rows_end_by_their_limits_without_a_look():
    living = Living([3, 5, 3, 9])
    assert (living.count, living.needed) == (4, 9)
    living.ran(3)
    assert (living.count, living.needed) == (2, 6)
    assert living.gather().tolist() == [1, 3]
    assert len(living) == 2
    living.ran(2)
    assert living.gather().tolist() == [1]
    living.ran(4)
    assert (living.count, living.needed) == (0, 0)


def test_against_a_list_of_rows():
    draw = random.Random(0)
    for _ in range(50):
        limits = [draw.randint(1, 30) for _ in range(draw.randint(1, 12))]
        ends = [min(limit, draw.randint(1, 40)) for limit in limits]
        living, batch, steps = Living(limits), list(range(len(limits))), 0
        seen: set[int] = set()
        while living.count:
            assert len(living) == len(batch)
            chunk = min(4, living.needed)
            look = [int(ends[row] > steps + chunk - 1) for row in batch]
            steps += chunk
            living.ran(chunk)
            living.saw(torch.tensor(look))
            seen |= {row for row, alive in zip(batch, look, strict=True) if not alive}
            left = [row for row in batch if row not in seen and limits[row] > steps]
            assert living.count == len(left)
            if left:
                assert living.needed == max(limits[row] for row in left) - steps
            if draw.random() < 0.5 and left:
                batch = [batch[place] for place in living.gather().tolist()]
                assert batch == left
        assert all(end <= steps for end in ends)
