"""reasoning-gym's data sets as tasks: rows without end, scored by the data set's own scorer.

Which split a question belongs to follows from a checksum of its text, so that no question is in
both, whatever the seed. Scorers read the model's text, some of them with `eval`; they run in a
sandbox where that is replaced (`gym_scoring`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from asymgrpo.errors import UserError
from asymgrpo.tasks.answers import LONGEST_TEXT, stated_answer
from asymgrpo.tasks.base import Example, Grade
from asymgrpo.tasks.prompts import PLACEHOLDER, check_template, fill
from asymgrpo.tasks.rows import SPLITS
from asymgrpo.tasks.sandbox import CallFailedError, shared_sandbox

TEST_SHARE = 4
"""One question in so many belongs to the test split."""
ROWS = 1_000_000
"""Rows of a split unless `size` says otherwise; they are made on access."""
LONGEST_ANSWER = 20_000
ATTEMPTS = 1_000
"""Draws for one row before a data set counts as too small to split."""

_SCORING = "asymgrpo.tasks.gym_scoring"
_CHUNK = 10
_INSTRUCTION = PLACEHOLDER + "\n\nGive the final answer, and nothing else, in <answer></answer>."
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def gym_names() -> list[str]:
    """All of reasoning-gym's data sets but `composite`, which is a mixture of the others."""
    return sorted(set(_registry()) - {"composite"})


def _registry() -> dict[str, tuple[type[Any], type[Any]]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "reasoning-gym is not installed; run: pip install 'asymgrpo[train,gym]'"
        ) from error
    datasets: dict[str, tuple[type[Any], type[Any]]] = reasoning_gym.factory.DATASETS
    return datasets


class GymTask:
    """One data set of reasoning-gym; `options` are the fields of its configuration.

    >>> task = GymTask("chain_sum", max_terms=2)
    >>> row = task.examples("train")[123_456]
    >>> task.grade(f"<answer>{row['answer']}</answer>", row).score
    1.0
    """

    def __init__(self, dataset: str, prompt: str | None = None, **options: Any) -> None:
        if dataset not in gym_names():
            raise UserError(
                f"reasoning-gym has no data set {dataset!r}{nearest(dataset, gym_names())}"
            )
        self.name = f"reasoning-gym:{dataset}"
        self._template = check_template(prompt or _INSTRUCTION)
        self._seed = _whole(options.pop("seed", 0), "seed")
        self._size = _whole(options.pop("size", ROWS), "size")
        self._dataset = dataset
        self._options = options
        self._generator = _Generator(dataset, options, self._seed)
        self._sandbox = shared_sandbox(_SCORING, dataset, options)
        self._sandbox.start()

    def examples(self, split: str) -> Sequence[Example]:
        if split not in SPLITS:
            raise UserError(f"no split {split!r}; the splits are train and test")
        return GymRows(self._generator, split, self._size)

    def prompt(self, example: Example) -> str:
        return fill(self._template, str(example["question"]))

    def grade(self, completion: str, example: Example) -> Grade:
        answer = gym_answer(completion)
        if not answer:
            return Grade(0.0, None, "no answer was found in the completion")
        if len(answer) > LONGEST_ANSWER:
            reason = f"the answer is longer than {LONGEST_ANSWER:,} characters"
            return Grade(0.0, answer[:200], reason)
        try:
            score = self._sandbox.call("score", answer, dict(example))
        except CallFailedError as failure:
            return Grade(0.0, answer[:200], f"the scorer failed: {failure}", failed=True)
        return Grade(float(score), answer[:200], f"reasoning-gym scores it {score:g}")


def gym_answer(completion: str) -> str:
    """The last tagged answer, or else the last stated one, or else all of the text.

    >>> gym_answer("<answer>4</answer> or rather <answer>5</answer>")
    '5'
    """
    text = completion[-LONGEST_TEXT:]
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    stated = stated_answer(text)
    return stated.text if stated is not None else text.strip()


class GymRows(Sequence[Example]):
    """The rows of one split; row i is always the same row, and is made when it is asked for."""

    def __init__(self, generator: _Generator, split: str, size: int) -> None:
        self._generator = generator
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        first = (index % self._size) * ATTEMPTS
        for draw in range(first, first + ATTEMPTS):
            row = self._generator.draw(draw)
            if split_of(row["question"]) == self._split:
                return row
        raise UserError(
            f"{self._generator.name}: no {self._split} question in {ATTEMPTS} draws; "
            "choose options that allow for more questions"
        )


def split_of(question: str) -> str:
    """The split that a question belongs to, by its text alone."""
    checksum = zlib.crc32(" ".join(question.split()).encode())
    return "test" if checksum % TEST_SHARE == 0 else "train"


class _Generator:
    """Numbered draws from a data set, without a bound on the number."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.name = name
        self._dataset_class, self._config_class = _registry()[name]
        known = {field.name for field in dataclasses.fields(self._config_class)}
        for option in options:
            if option not in known:
                raise UserError(
                    f"reasoning-gym:{name} has no option {option!r}"
                    f"{nearest(option, sorted(known - {'seed', 'size'}))}"
                )
        self._options = options
        self._seed = seed
        self._first = self._chunk(0)
        self._later: tuple[int, Any] | None = None

    def draw(self, number: int) -> Example:
        with _own_randomness(number):
            return dict(self._item(number))

    def _item(self, number: int) -> Any:
        try:
            # Most data sets draw an item from its index alone, far beyond their size.
            return self._first[number]
        except IndexError:
            chunk, offset = divmod(number, _CHUNK)
            if self._later is None or self._later[0] != chunk:
                self._later = (chunk, self._chunk(chunk))
            return self._later[1][offset]

    def _chunk(self, number: int) -> Any:
        # Item numbers are added to the seed, and NumPy takes no seed beyond 32 bits.
        seed = zlib.crc32(f"{self._seed}:{number}".encode()) >> 2
        try:
            config = self._config_class(**self._options, seed=seed, size=_CHUNK)
            if hasattr(config, "validate"):
                config.validate()
            return self._dataset_class(config)
        except (AssertionError, TypeError, ValueError) as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"reasoning-gym:{self.name} refuses its options: {cause}") from error


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Some data sets draw from the global generators: seed those, and leave them as they were."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: the likeliest names, or all of a short list.

    >>> nearest("chain_sums", ["chain_sum", "countdown"])
    '; did you mean chain_sum?'
    """
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; the names are {', '.join(names)}" if 0 < len(names) <= 20 else ""


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < (name == "size"):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    return value
