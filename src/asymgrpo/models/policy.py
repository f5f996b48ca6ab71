"""Loads a policy: the model and the tokenizer, fixed where needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asymgrpo.errors import UserError
from asymgrpo.models.gguf_header import read_gguf_values
from asymgrpo.models.model_sources import Source, find_source, has_tokenizer
from asymgrpo.models.tokenizer import align_model, fix_gguf_tokenizer, fix_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer."""

    model: PreTrainedModel
    """In evaluation mode; a PeftModel if the spec names an adapter."""
    tokenizer: PreTrainedTokenizerBase
    """Has an end token and a pad token, which differ."""
    spec: str
    """What the user asked for."""
    source: str
    """Where it was found: the hub id, or the path of a folder or a file."""


def load_policy(
    spec: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    trainable: bool = False,
) -> Policy:
    """Loads `tiny`, `smollm2-135m`, a hub id, a model, adapter or run folder, or a GGUF file.

    `dtype="auto"` keeps the dtype that the weights are stored in; a GGUF file is expanded to
    float32. `trainable` makes the weights of an adapter trainable. Code from the hub runs only with
    `trust_remote_code`; weights in other formats than safetensors are read without unpickling
    objects.

    >>> policy = load_policy("tiny")
    >>> policy.model.config.model_type, policy.model.dtype
    ('qwen2', torch.float32)
    """
    source = find_source(spec)
    if source.kind == "adapter":
        policy = _load_adapter(spec, source, dtype, trust_remote_code, trainable)
    elif source.kind == "gguf":
        policy = _load_gguf(spec, Path(source.location), dtype)
    else:
        policy = _load_folder_or_hub(spec, source.location, dtype, trust_remote_code)
    if device is not None:
        policy.model.to(device)  # type: ignore[arg-type]
    return policy


def _load_folder_or_hub(
    spec: str, location: str, dtype: str | torch.dtype, trust_remote_code: bool
) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with _one_line_errors(spec):
        # The configuration first: if the hub cannot be reached, only one file times out.
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            location, config=config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return _finished(Policy(model, tokenizer, spec, location))


def _load_gguf(spec: str, file: Path, dtype: str | torch.dtype) -> Policy:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError("reading a GGUF file needs the package gguf: pip install gguf") from error
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    header = read_gguf_values(file)
    folder, name = str(file.parent), file.name
    with _one_line_errors(spec):
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, gguf_file=name, dtype=dtype, **_unpacked_weights()
        )
    fix_gguf_tokenizer(tokenizer, header)
    # So that an adapter trained on it names the file, not its folder, as its base.
    model.name_or_path = model.config.name_or_path = str(file)
    return _finished(Policy(model, tokenizer, spec, str(file)))


def _unpacked_weights() -> dict[str, Any]:
    """Newer versions of transformers keep a GGUF model quantized, so that it cannot be trained."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _load_adapter(
    spec: str, source: Source, dtype: str | torch.dtype, trust_remote_code: bool, trainable: bool
) -> Policy:
    from peft import PeftModel
    from transformers import AutoTokenizer

    assert source.base is not None
    base = load_policy(source.base, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = base.tokenizer
    with _one_line_errors(spec):
        if has_tokenizer(Path(source.location)):
            tokenizer = AutoTokenizer.from_pretrained(
                source.location, trust_remote_code=trust_remote_code
            )
            fix_tokenizer(tokenizer, spec)
        model: Any = PeftModel.from_pretrained(base.model, source.location, is_trainable=trainable)
    model.eval()
    return replace(base, model=model, tokenizer=tokenizer, spec=spec, source=source.location)


def _finished(policy: Policy) -> Policy:
    fix_tokenizer(policy.tokenizer, policy.spec)
    align_model(policy.model, policy.tokenizer)
    return policy


@contextmanager
def _one_line_errors(spec: str) -> Iterator[None]:
    """Turns the libraries' errors for a missing, gated or damaged model into one line."""
    from pickle import UnpicklingError

    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )
    from safetensors import SafetensorError

    advice = {
        GatedRepoError: "access is restricted; ask for it on the hub, then `hf auth login`",
        RepositoryNotFoundError: "the hub has no such model, or it is private: `hf auth login`",
        OfflineModeIsEnabled: "it is not in the local cache and HF_HUB_OFFLINE is set",
        LocalEntryNotFoundError: "it is not in the local cache and the hub cannot be reached",
        SafetensorError: "its weights are damaged; fetch or save them again",
        UnpicklingError: "its weights hold objects, not only tensors; ask for safetensors",
    }
    try:
        yield
    except UserError:
        raise
    # RuntimeError: an adapter whose shapes do not match its base
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        chain = list(_causes(error))
        for kind, text in advice.items():
            if any(isinstance(cause, kind) for cause in chain):
                raise UserError(f"cannot load {spec}: {text}") from error
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load {spec}: {first_line}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
