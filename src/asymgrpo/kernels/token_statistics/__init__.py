"""Log-probs and entropies of target tokens from hidden states, without the full logits."""

from .chunked_statistics import Head, token_statistics

__all__ = ["Head", "token_statistics"]
