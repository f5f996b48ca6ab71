"""Evaluation with an engine whose chance of a right answer is known."""

import json
import random

import pytest

from asymgrpo.errors import UserError
from asymgrpo.evaluation import evaluate, evaluate_policy, maj_at_k, summarize
from asymgrpo.evaluation.evaluate import prompt_ids, rollout_seed
from asymgrpo.rollout.records import Rollout, Sampling
from asymgrpo.tasks import Grade

END = 0


class CharTokenizer:
    """A token a character; 0 ends a text."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(token) for token in ids if token != END)


class ChatTokenizer(CharTokenizer):
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt
        assert tokenize
        assert return_dict
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return {"input_ids": [ord(letter) for letter in text + "<assistant>"]}


class PercentTask:
    """The prompt says the chance in percent that the engine answers `yes`, which is right."""

    name = "percent"

    def examples(self, split):
        return [{"id": f"p{chance}", "chance": chance} for chance in (10, 50, 90)]

    def prompt(self, example):
        return f"{example['chance']:03d}"

    def grade(self, completion, example):
        if completion == "yes":
            return Grade(1.0, "yes", "right")
        return Grade(0.0, None if completion == "?" else completion, "wrong")


class KnownEngine:
    name = "known"

    def __init__(self, stop_after=None):
        self.calls = []
        self.stop_after = stop_after

    def generate(self, prompts, sampling, seeds, on_progress=None):
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((tuple(map(tuple, prompts)), tuple(seeds), sampling.greedy))
        rollouts = []
        for done, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True), 1):
            chance = int("".join(map(chr, prompt))) / 100
            lucky = chance >= 0.5 if sampling.greedy else random.Random(seed).random() < chance
            text = "yes" if lucky else random.Random(seed + 1).choice(["no", "nay", "?"])
            ids = (*(ord(letter) for letter in text), END)
            rollouts.append(Rollout(tuple(prompt), ids, None, None, True))
            if on_progress:
                on_progress(done, len(prompts))
        return rollouts


def evaluated(engine=None, task=None, tokenizer=None, **changes):
    task = task or PercentTask()
    options = {
        "samples": 16,
        "ks": [1, 2, 4],
        "sampling": Sampling(max_new_tokens=8),
        "seed": 7,
        **changes,
    }
    examples = options.pop("examples", None) or task.examples("test")
    return evaluate_policy(
        engine or KnownEngine(), tokenizer or CharTokenizer(), task, examples, **options
    )


def test_record_has_the_known_figures():
    examples = [{"chance": 30}] * 400
    record = evaluated(examples=examples)
    metrics = record["metrics"]
    # the share of 6,400 draws at 0.3 has a standard error of 0.0057
    assert metrics["pass@1"]["value"] == pytest.approx(0.3, abs=4 * 0.0057)
    assert metrics["pass@4"]["value"] == pytest.approx(1 - 0.7**4, abs=0.03)
    assert metrics["pass@1"] == metrics["avg@16"]
    assert metrics["greedy"]["value"] == 0.0
    assert set(metrics) == {"pass@1", "pass@2", "pass@4", "avg@16"} | {
        "maj@2",
        "maj@4",
        "maj@16",
        "greedy",
    }
    for metric in metrics.values():
        assert 0 <= metric["low"] <= metric["value"] <= metric["high"] <= 1


def test_record_keeps_every_problem():
    record = evaluated()
    assert [problem["id"] for problem in record["problems"]] == ["p10", "p50", "p90"]
    assert record["k"] == [1, 2, 4]
    assert (record["task"], record["split"], record["samples"]) == ("percent", "test", 16)
    assert (record["seed"], record["grader_failures"]) == (7, 0)
    assert record["sampling"]["max_new_tokens"] == 8
    for problem in record["problems"]:
        assert set(problem) == {"id", "scores", "answers", "votes", "lengths", "greedy", "row"}
        assert len(problem["scores"]) == len(problem["answers"]) == len(problem["lengths"]) == 16
        answers = ["yes" if score else "other" for score in problem["scores"]]
        assert [a if a == "yes" else "other" for a in problem["answers"]] == answers
    assert [problem["greedy"] for problem in record["problems"]] == [0.0, 1.0, 1.0]
    json.dumps(record)


def test_seeds_depend_on_seed_problem_and_sample_alone():
    wanted = [rollout_seed(7, problem, sample) for problem in range(3) for sample in range(16)]
    assert len(set(wanted)) == 48
    assert all(0 <= seed < 2**63 for seed in wanted)
    assert rollout_seed(0, 11, 1) != rollout_seed(0, 1, 11)
    # pinned, since a saved evaluation must be repeatable by a later version
    assert rollout_seed(0, 0, 0) == 4097999227120815638
    engine = KnownEngine()
    evaluated(engine)
    assert engine.calls[0][1] == tuple(wanted)


def test_chunks_do_not_change_the_result(monkeypatch):
    whole = evaluated()
    monkeypatch.setattr(evaluate, "ROLLOUTS_A_CHUNK", 1)
    engine = KnownEngine()
    assert evaluated(engine) == whole
    assert len(engine.calls) == 6


def test_progress_counts_rollouts(monkeypatch):
    monkeypatch.setattr(evaluate, "ROLLOUTS_A_CHUNK", 17)
    seen = []
    evaluated(on_progress=lambda done, total: seen.append((done, total)))
    counts = [done for done, _ in seen]
    assert {total for _, total in seen} == {51}
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 51)


def test_without_greedy():
    engine = KnownEngine()
    record = evaluated(engine, greedy=False)
    assert "greedy" not in record["metrics"]
    assert [problem["greedy"] for problem in record["problems"]] == [None] * 3
    assert len(engine.calls) == 1


def test_chat_template_is_used_where_there_is_one():
    ids = prompt_ids(PercentTask(), {"chance": 5}, ChatTokenizer())
    assert "".join(map(chr, ids)) == "<user>005<assistant>"
    assert "".join(map(chr, prompt_ids(PercentTask(), {"chance": 5}, CharTokenizer()))) == "005"


def test_ids_that_repeat_give_way_to_places():
    record = evaluated(examples=[{"id": 1, "chance": 10}, {"id": 1, "chance": 20}])
    assert [problem["id"] for problem in record["problems"]] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ks": [32]}, "k = 32 needs between 1 and 16"),
        ({"ks": [0]}, "k = 0"),
        ({"samples": 0}, "samples must be at least 1"),
    ],
)
def test_mistakes_are_told(changes, says):
    with pytest.raises(UserError, match=says):
        evaluated(**changes)


def test_no_problems_is_a_mistake():
    with pytest.raises(UserError, match="no problems"):
        evaluate_policy(
            KnownEngine(), CharTokenizer(), PercentTask(), [], samples=1, ks=[1],
            sampling=Sampling(), seed=0,
        )  # fmt: skip


# resuming


@pytest.fixture
def one_problem_a_chunk(monkeypatch):
    monkeypatch.setattr(evaluate, "ROLLOUTS_A_CHUNK", 1)


@pytest.mark.usefixtures("one_problem_a_chunk")
def test_a_stopped_evaluation_goes_on(tmp_path):
    partial = tmp_path / "evaluations" / "step-000000.partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluated(KnownEngine(stop_after=2), partial=partial)
    engine = KnownEngine()
    seen = []
    record = evaluated(engine, partial=partial, on_progress=lambda *count: seen.append(count))
    assert record == evaluated()
    assert len(engine.calls) == 4  # two problems, sampled and greedy
    assert seen[0] == (17, 51)
    again = KnownEngine()
    assert evaluated(again, partial=partial) == record
    assert again.calls == []


@pytest.mark.usefixtures("one_problem_a_chunk")
@pytest.mark.parametrize("cut", [1, 40])
def test_a_torn_line_is_mended(tmp_path, cut):
    partial = tmp_path / "partial.jsonl"
    evaluated(partial=partial)
    partial.write_bytes(partial.read_bytes()[:-cut])
    engine = KnownEngine()
    assert evaluated(engine, partial=partial) == evaluated()
    assert len(engine.calls) == 2
    lines = partial.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 8},
        {"samples": 8},
        {"sampling": Sampling(max_new_tokens=8, temperature=0.5)},
        {"model_key": "step 40"},
        {"greedy": False},
    ],
)
def test_another_setting_is_not_mixed_in(tmp_path, changes):
    partial = tmp_path / "partial.jsonl"
    first = evaluated(partial=partial)
    engine = KnownEngine()
    assert evaluated(engine, partial=partial, **changes) == evaluated(**changes)
    assert engine.calls
    # and the first is still there
    assert evaluated(KnownEngine(stop_after=0), partial=partial) == first


def test_another_prompt_is_not_mixed_in(tmp_path):
    partial = tmp_path / "partial.jsonl"
    evaluated(partial=partial)
    engine = KnownEngine()
    examples = PercentTask().examples("test")
    examples[1]["chance"] = 51
    evaluated(engine, partial=partial, examples=examples)
    assert len(engine.calls[0][0]) == 16


def test_grades_against_a_reference_that_was_edited_are_not_kept(tmp_path):
    """The prompt is the same; what it is graded against is not."""
    partial = tmp_path / "partial.jsonl"
    rows = [{"id": n, "chance": 50, "answer": "yes"} for n in range(3)]

    class Compared(PercentTask):
        def grade(self, completion, example):
            return Grade(float(completion == example["answer"]), completion, "compared")

    before = evaluated(task=Compared(), partial=partial, examples=rows)
    rows[1] = {**rows[1], "answer": "no"}
    engine = KnownEngine()
    after = evaluated(engine, task=Compared(), partial=partial, examples=rows)
    assert len(engine.calls[0][0]) == 16  # one problem is sampled anew
    assert after == evaluated(task=Compared(), examples=rows)
    assert after["problems"][1]["scores"] != before["problems"][1]["scores"]
    keys = [[p["row"] for p in record["problems"]] for record in (before, after)]
    assert [one == other for one, other in zip(*keys, strict=True)] == [True, False, True]
    # nor under other options of the task
    again = KnownEngine()
    evaluated(again, task=Compared(), partial=partial, examples=rows, task_key="?grader=text")
    assert len(again.calls[0][0]) == 48


def test_samples_are_logged_and_survive_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "ROLLOUTS_A_CHUNK", 1)
    partial = tmp_path / "partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluated(KnownEngine(stop_after=2), partial=partial, log=True)
    record = evaluated(partial=partial, log=True)
    lines = record.pop("log")
    assert record == evaluated()
    assert len(lines) == 3 * 17
    for line in lines:
        problem = next(p for p in record["problems"] if p["id"] == line["problem"])
        if line["greedy"]:
            assert (line["sample"], line["score"]) == (16, problem["greedy"])
            continue
        place = line["sample"]
        found = [problem[name][place] for name in ("scores", "answers", "lengths")]
        assert [line["score"], line["answer"], line["tokens"]] == found
        assert line["prompt"] == f"0{line['problem'][1:]}"
        assert (line["finish"], line["reference"]) == ("stop", None)
        assert line["completion"] == (line["answer"] or "?")


@pytest.mark.parametrize("given", [1.0, None, "1"])
def test_a_grader_that_gives_no_grade_is_told(given):
    class Bare(PercentTask):
        def grade(self, completion, example):
            return given if given == 1.0 else Grade(given, completion, "odd")

    says = "returned float; return an" if given == 1.0 else "a score is a number from 0 to 1"
    with pytest.raises(UserError, match=f"the grader of percent.*{says}"):
        evaluated(task=Bare())


def test_a_broken_line_in_the_middle_is_told(tmp_path):
    partial = tmp_path / "partial.jsonl"
    partial.write_text("not json\n{}\n")
    with pytest.raises(UserError, match=r"partial.jsonl:1 .* move the file elsewhere"):
        evaluated(partial=partial)


# grader failures


class FailingTask(PercentTask):
    def __init__(self, fails):
        self.fails = fails

    def grade(self, completion, example):
        if self.fails(example):
            return Grade(0.0, None, "out of time", failed=True)
        return super().grade(completion, example)


def test_a_grader_that_fails_stops_the_evaluation():
    with pytest.raises(UserError, match="out of time"):
        evaluated(task=FailingTask(lambda example: example["chance"] == 50))


def test_a_small_evaluation_is_stopped_too():
    with pytest.raises(UserError, match="out of time"):
        evaluated(task=FailingTask(lambda example: True), samples=1, ks=[1])


def test_failures_are_counted_and_not_saved(tmp_path):
    partial = tmp_path / "partial.jsonl"
    examples = [{"chance": 40 + number} for number in range(40)]
    record = evaluated(
        task=FailingTask(lambda e: e["chance"] == 41), examples=examples, partial=partial
    )
    assert record["grader_failures"] == 17
    engine = KnownEngine()
    mended = evaluated(engine, examples=examples, partial=partial)
    assert mended["grader_failures"] == 0
    assert len(engine.calls[0][0]) == 16


class SpelledTask(PercentTask):
    """Wrong answers are one answer in two spellings."""

    def grade(self, completion, example):
        grade = super().grade(completion, example)
        key = {"nay": "no"}.get(completion, grade.answer)
        return Grade(grade.score, grade.answer, grade.reason, key=key)


def test_equal_answers_vote_together_whatever_their_spelling():
    spelled, plain = evaluated(task=SpelledTask()), evaluated()
    problem = spelled["problems"][0]
    assert set(problem["votes"]) == {"yes", "no", None}
    assert problem["answers"] == plain["problems"][0]["answers"]
    for one, other in zip(spelled["problems"], plain["problems"], strict=True):
        joined = ["no" if answer == "nay" else answer for answer in other["answers"]]
        assert one["votes"] == joined
    expected = sum(maj_at_k(p["votes"], p["scores"], 4) for p in spelled["problems"]) / 3
    assert spelled["metrics"]["maj@4"]["value"] == pytest.approx(expected, abs=1e-12)
    # a right minority against "no" and "nay", which are one answer
    problem = {"scores": [1.0, 1.0, 0, 0, 0], "greedy": None}
    answers = ["yes", "yes", "no", "no", "nay"]
    votes = ["yes", "yes", "no", "no", "no"]
    assert summarize([{**problem, "answers": answers}], [5])["maj@5"].value == 0.5
    assert summarize([{**problem, "answers": answers, "votes": votes}], [5])["maj@5"].value == 0.0


@pytest.mark.parametrize("score", [float("nan"), -1.0, 2.0])
def test_a_score_outside_zero_to_one_is_told(score):
    class Odd(PercentTask):
        def grade(self, completion, example):
            return Grade(score, completion, "odd")

    with pytest.raises(UserError, match=r"the grader of percent: a score is a number from 0 to 1"):
        evaluated(task=Odd())


def test_related_problems_are_resampled_together():
    rows = [{"id": n, "chance": (10, 90)[n // 4 % 2], "family": n // 4} for n in range(40)]
    alone = evaluated(examples=rows)
    together = evaluated(examples=rows, cluster="family")
    assert [problem["cluster"] for problem in together["problems"]][:5] == ["0"] * 4 + ["1"]
    assert together["cluster"] == "family"
    one, other = alone["metrics"]["pass@1"], together["metrics"]["pass@1"]
    assert one["value"] == other["value"]
    assert other["high"] - other["low"] > 1.4 * (one["high"] - one["low"])
    with pytest.raises(UserError, match="no column kind to group related problems by"):
        evaluated(examples=rows, cluster="kind")
