"""What a tokenizer needs for training, and fixes for tokenizers that lack it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asymgrpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ADDED_PAD = "<|pad|>"
_SINGLE_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""GGUF's names of pre-tokenizers that split numbers into single digits first."""


def fix_tokenizer(tokenizer: PreTrainedTokenizerBase, spec: str) -> None:
    """Gives the tokenizer a pad token of its own, so that padding is never taken for an end token.

    A token that is in the vocabulary is preferred, since the embeddings then keep their shape. A
    missing end token cannot be guessed and is an error.
    """
    end = tokenizer.eos_token
    if end is None:
        raise UserError(
            f"the tokenizer of {spec} has no end token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token is not None and tokenizer.pad_token != end:
        return
    specials = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    named = [token for token in specials if "pad" in token.lower() and token != end]
    unknown = tokenizer.unk_token
    if named:
        tokenizer.pad_token = named[0]
    elif unknown is not None and unknown != end:
        tokenizer.pad_token = unknown
    else:
        tokenizer.add_special_tokens({"pad_token": _ADDED_PAD})


def align_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the model the tokenizer's pad token, and an embedding for each of its tokens."""
    embeddings: Any = model.get_input_embeddings()
    if len(tokenizer) > embeddings.num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id


def fix_gguf_tokenizer(tokenizer: Any, header: Mapping[str, Any]) -> None:
    """Restores what transformers loses when it converts a GGUF file's tokenizer.

    Special tokens are taken from the ids in the file, and numbers are split into single digits
    first where the file names a pre-tokenizer that does so.
    """
    from tokenizers import pre_tokenizers

    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = header.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(token_id)))
    # Decoding must return the text as it was, including spaces before a full stop.
    tokenizer.clean_up_tokenization_spaces = False
    if header.get("tokenizer.ggml.pre") in _SINGLE_DIGIT_SPLITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
