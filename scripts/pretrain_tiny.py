"""Pre-trains the built-in model `tiny` on the arithmetic task and writes its folder.

    PYTHONPATH=src python scripts/pretrain_tiny.py --out src/asymgrpo/models/tiny

The corpus holds three ways to answer: worked out without error, worked out in haste with a slip in
many answers, and guessed. A model trained to convergence on the mixture knows the reliable way but
does not prefer it, as a pretrained language model does, and so leaves room for reinforcement
learning. The way is chosen by the first word of the completion; wordings vary after it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from asymgrpo.tasks.arithmetic import ArithmeticTask

SHARES = {"worked": 0.32, "hasty": 0.33, "guessed": 0.35}
OPENINGS = {
    "worked": (" Step by step: ", " Working it out: ", " Carefully: "),
    "hasty": (" Quickly: ", " In short: "),
    "guessed": (" I guess the", " Maybe the"),
}
CLOSINGS = (" The", " So the", " Hence the")
SLIP_SHARE = 0.55  # of the hasty answers
GUESS_SHARE = 0.25  # of the guessed answers that are right
SLIPS = (-10, -2, -1, 1, 2, 10)
GUESSES = tuple(offset for offset in range(-12, 13) if offset)
SYMBOLS = {1: "+", -1: "-", 0: ("=",)}
WORDS = {1: "plus", -1: "minus", 0: ("is", "makes", "gives")}

PAD, EOS = "<pad>", "<eos>"
# A word takes the blanks around it along, a digit stands alone: numbers cost no blank tokens.
PIECES = r" ?[A-Za-z]+ ?|[0-9]| ?[-+=] ?|[.,:?] ?|\s|."
MAX_NEW_TOKENS = 56
ROW_TOKENS = 96  # more than the longest row has
CORPUS_SEED = 1  # the rows that training on the task starts with have seed 0


class Corpus(NamedTuple):
    tokens: np.ndarray  # [N, L] int16, padded on the right
    prompt_lengths: np.ndarray  # [N]
    lengths: np.ndarray  # [N]


def answer(numbers: list[int], rng: random.Random) -> tuple[str, str]:
    """A way to answer and the text of one answer in that way."""
    way = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    opening = rng.choice(OPENINGS[way])
    if way == "guessed":
        right = rng.random() < GUESS_SHARE
        guess = max(0, sum(numbers) + (0 if right else rng.choice(GUESSES)))
        return way, f"{opening} answer is {guess}."
    slip_at = -1
    if way == "hasty" and rng.random() < SLIP_SHARE:
        slip_at = rng.randrange(1, len(numbers))
    slips = [rng.choice(SLIPS) if i == slip_at else 0 for i in range(len(numbers))]
    totals = list(accumulate(n + slip for n, slip in zip(numbers, slips, strict=True)))
    style = rng.choice((SYMBOLS, WORDS))
    steps = [
        f"{style[1 if n > 0 else -1]} {abs(n)} {rng.choice(style[0])} {max(0, total)}"
        for n, total in zip(numbers[1:], totals[1:], strict=True)
    ]
    closing = rng.choice(CLOSINGS)
    return (
        way,
        f"{opening}{numbers[0]} {', '.join(steps)}.{closing} answer is {max(0, totals[-1])}.",
    )


def way_of(completion: str) -> str:
    """The way that a sampled completion opens with."""
    for way, openings in OPENINGS.items():
        if completion.startswith(tuple(opening.split(" ")[1] for opening in openings), 1):
            return way
    return "other"


def build_tokenizer() -> Qwen2Tokenizer:
    """Known words are one token, digits stand alone, other text falls back to its bytes.

    It is an ordinary Qwen2 tokenizer, as `AutoTokenizer` makes one of any Qwen2 folder: the words
    are added tokens, since its own splitting would spend a token on the blank before each number.
    """
    splitter = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    rng = random.Random(0)
    words: set[str] = set()
    for row in ArithmeticTask(CORPUS_SEED).examples("train")[:20_000]:
        for text in (row["question"], answer(row["numbers"], rng)[1]):
            words.update(piece for piece, _ in splitter.pre_tokenize_str(text) if len(piece) > 1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate([PAD, EOS, *alphabet])},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in sorted(words)])
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def encode_rows(bounds: tuple[int, int]) -> Corpus:
    """Training rows `bounds[0]` up to `bounds[1]`, each a prompt, an answer and the end token."""
    tokenizer = build_tokenizer()
    task = ArithmeticTask(CORPUS_SEED)
    rows = task.examples("train")[slice(*bounds)]
    rng = random.Random(bounds[0])
    prompts = tokenizer([task.prompt(row) for row in rows])["input_ids"]
    answers = tokenizer([answer(list(row["numbers"]), rng)[1] for row in rows])["input_ids"]
    tokens = np.full((len(rows), ROW_TOKENS), tokenizer.pad_token_id, dtype=np.int16)
    for target, p, a in zip(tokens, prompts, answers, strict=True):
        target[: len(p) + len(a) + 1] = [*p, *a, tokenizer.eos_token_id]
    lengths = np.array([len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True)])
    return Corpus(tokens, np.array([len(p) for p in prompts]), lengths)


def build_corpus(rows: int, workers: int) -> Corpus:
    chunk = math.ceil(rows / workers)
    bounds = [(start, min(rows, start + chunk)) for start in range(0, rows, chunk)]
    # Spawned, for a forked child of a process that has used the rust tokenizer can deadlock.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(encode_rows, bounds)
    corpus = Corpus(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return corpus._replace(tokens=corpus.tokens[:, : corpus.lengths.max()])


def learning_rate(progress: float, peak: float) -> float:
    """A short linear rise, then half a cosine."""
    warmup = 0.03
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def train(model: Qwen2ForCausalLM, corpus: Corpus, args: argparse.Namespace) -> dict[str, float]:
    """Next-token loss on the answers alone, for so many steps or seconds, what is less."""
    device = next(model.parameters()).device
    tokens, prompt_lengths, lengths = (torch.as_tensor(a).to(device) for a in corpus)
    positions = torch.arange(tokens.shape[1], device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    generator = torch.Generator(device=device).manual_seed(args.seed)
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        optimizer.param_groups[0]["lr"] = learning_rate(progress, args.lr)
        rows = torch.randint(len(tokens), (args.batch,), device=device, generator=generator)
        ids = tokens[rows].long()
        is_answer = (positions >= prompt_lengths[rows, None]) & (positions < lengths[rows, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        targets = ids[:, 1:].masked_fill(~is_answer[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % args.log_every == 0:
            print(
                f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True
            )
        progress = max(step / args.steps, (time.monotonic() - started) / args.max_seconds)
    return {"steps": step, "seconds": round(time.monotonic() - started, 1), "loss": loss.item()}


@torch.no_grad()
def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: int, samples: int
) -> dict[str, object]:
    """Accuracy on held-out problems at temperature 1, in all and for each way of answering."""
    task = ArithmeticTask()
    rows = [row for row in task.examples("test")[:problems] for _ in range(samples)]
    texts: list[str] = []
    model.eval()
    for start in range(0, len(rows), 2048):
        prompts = [task.prompt(row) for row in rows[start : start + 2048]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
        out = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        new = out[:, batch["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    scores = [task.grade(text, row).score for text, row in zip(texts, rows, strict=True)]
    by_way: dict[str, list[float]] = {}
    for text, score in zip(texts, scores, strict=True):
        by_way.setdefault(way_of(text), []).append(score)
    return {
        "problems": problems,
        "samples": samples,
        "pass@1": sum(scores) / len(scores),
        "mean_tokens": sum(len(ids) for ids in tokenizer(texts)["input_ids"]) / len(texts) + 1,
        "ways": {
            way: {"share": len(s) / len(scores), "accuracy": sum(s) / len(s)}
            for way, s in sorted(by_way.items())
        },
        "texts": [task.prompt(rows[i]) + texts[i] for i in range(0, len(rows), len(rows) // 8)],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=500_000, help="training rows")
    parser.add_argument("--steps", type=int, default=2_400)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--batch", type=int, default=2_048, help="rows a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--problems", type=int, default=1_000, help="held-out problems")
    parser.add_argument("--samples", type=int, default=8, help="samples a problem")
    parser.add_argument("--log-every", type=int, default=250)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.layers).to(device)
    started = time.monotonic()
    corpus = build_corpus(args.rows, args.workers)
    print(
        f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens; {args.rows:,} rows of "
        f"{corpus.lengths.mean():.1f} tokens, at most {corpus.lengths.max()}, in "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    training = train(model, corpus, args)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    results = {"training": training, **measure(model, tokenizer, args.problems, args.samples)}
    print(json.dumps(results, indent=1))
    (args.out / "pretraining.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
