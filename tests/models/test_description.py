"""One description of a model, shared by the engine and the scorer."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from asymgrpo.models.description import causal_model, text_config, unsupported
from asymgrpo.models.self_test import (
    PREFIX,
    compute_types,
    disagreement,
    own_logits,
    probe_tokens,
)
from small import make_model


def test_the_causal_model_is_found_inside_every_wrapper():
    model = make_model()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for wrapped in (
        adapted,
        nn.DataParallel(adapted),
        torch.compile(adapted),
        torch.compile(nn.DataParallel(adapted)),
    ):
        assert causal_model(wrapped) is model
        assert text_config(wrapped) is model.config


@pytest.mark.parametrize("use", ["decode", "score"])
def test_both_uses_give_the_same_reasons(use):
    model = make_model()
    assert unsupported(model, use) is None
    for change, reason in [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"use_bidirectional_attention": True}, "both directions"),
    ]:
        other = make_model()
        for name, value in change.items():
            setattr(other.config, name, value)
        assert reason in unsupported(other, use)
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    learned = get_peft_model(make_model(), virtual)
    assert "virtual tokens" in unsupported(learned, use)
    assert "virtual tokens" in unsupported(nn.DataParallel(learned), use)


def test_the_probe_shares_a_prefix_and_leaves_the_model_as_it_was():
    model = make_model().train()
    tokens = probe_tokens(model)
    assert torch.equal(tokens[0, :PREFIX], tokens[1, :PREFIX])
    assert not torch.equal(tokens[0], tokens[1])
    logits = own_logits(model, tokens)
    assert model.training
    assert not logits.requires_grad
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(input_ids=tokens).logits)


def test_rounding_agrees_and_mistakes_do_not():
    model = make_model()
    tokens = probe_tokens(model)
    own = own_logits(model, tokens)
    logps = own.log_softmax(-1)
    rounded = own_logits(model.to(torch.bfloat16), tokens)
    assert compute_types(model) == {torch.bfloat16}
    assert disagreement(rounded - own, logps, *compute_types(model)) is None
    assert disagreement(rounded - own, logps, torch.float32) > 1e-3
    shifted = own_logits(model.float(), tokens.roll(1, 1))
    assert disagreement(shifted - own, logps, torch.bfloat16) > 0.1
    assert disagreement(own * torch.nan, logps, torch.bfloat16) is not None
