"""Ways of generating that draw for other rows than they return have no log-probs to record."""

from __future__ import annotations

import torch

from asymgrpo.training.recorded_generate import recorded
from small import make_model


def test_beam_search_records_nothing_and_raises_nothing():
    model = make_model().eval()
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with recorded(model) as recorder:
        ids = model.generate(prompt, num_beams=3, max_new_tokens=4, min_new_tokens=4)
    assert len(ids) == 2
    assert recorder.logps(ids[:, 3:].tolist()) is None
