"""Questions from a file: which files are valid, how answers are matched, and their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit.environments.questions import SAMPLES, Question, Questions, QuestionTasks, is_right, read_questions
from envkit.errors import ConfigError, OptionError, StepOrderError, UsageError


def file_of(folder: Path, *entries: object) -> str:
    """Write a file with these lines, and return its path. Texts are written as they are."""
    path = folder / "q.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in entries), encoding="utf-8")
    return str(path)


def many(count: int, **more: str) -> list[dict[str, str]]:
    return [{"prompt": f"What is {number}?", "answer": str(number), **more} for number in range(count)]


def test_a_file_has_a_question_per_line_and_the_match_follows_from_the_answer(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        {"prompt": "1+1?", "answer": 2},
        "",
        {"prompt": "A thousand?", "answer": "1,000.5"},
        {"prompt": "Many?", "answer": 1e16},
        {"prompt": "Half?", "answer": "50%"},
        {"prompt": "France?", "answer": " Paris "},
        {"prompt": "2025?", "answer": "2025-06-01"},
        {"prompt": "Which?", "answer": "a|b", "match": "regex"},
    )
    assert read_questions(file) == [
        Question("1+1?", "2", "number"),
        Question("A thousand?", "1,000.5", "number"),
        Question("Many?", "1e+16", "number"),
        Question("Half?", "50%", "number"),
        Question("France?", "Paris", "exact"),
        Question("2025?", "2025-06-01", "exact"),
        Question("Which?", "a|b", "regex"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not valid JSON: Expecting property name enclosed in double quotes at column 2"),
        ({"prompt": "a"}, "answer: must be a text that is not empty, got None"),
        ('{"prompt": "a", "answer": NaN}', "answer: must be a text that is not empty, got nan"),
        ({"prompt": "a", "anser": "b"}, "anser: no such key; did you mean 'answer'?"),
        ({"prompt": "a", "answer": "b", "match": "fuzzy"}, "match: 'fuzzy' is not a known value"),
        ({"prompt": "a", "answer": "b", "match": "number"}, "answer: must contain a number if the match is 'number'"),
        ({"prompt": "a", "answer": "(", "match": "regex"}, "answer: must be a regular expression (missing )"),
        ({"prompt": "a", "answer": "b", "split": "eval"}, "split: give every question of the file a split, or none"),
    ],
)
def test_an_invalid_line_is_named_with_its_file_and_number(tmp_path: Path, line: object, problem: str) -> None:
    file = file_of(tmp_path, {"prompt": "a", "answer": "b"}, line)
    with pytest.raises(ConfigError) as raised:
        QuestionTasks(file=file)
    (found,) = raised.value.problems
    assert found.startswith(f"{file}:2: {problem}")


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"file: cannot read .*absent\.jsonl"):
        QuestionTasks(file=str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="the file has no questions"):
        QuestionTasks(file=file_of(tmp_path, "", ""))


@pytest.mark.parametrize(
    ("match", "answer", "action", "right"),
    [
        ("number", "42", "6 times 7 is 42.0", True),
        ("number", "0.5", "1/2", True),
        ("number", "6.02e23", "23", False),
        ("number", "5", "It is .5 or 5", None),
        ("number", "42", "<answer>41</answer> or 42", False),
        ("exact", "Paris", "paris\n", True),
        ("exact", "Paris", "It is Paris.", False),
        ("exact", "Paris", " ", None),
        ("contains", "Jupiter", "It is JUPITER.", True),
        ("contains", "Jupiter", "<answer>Mars</answer> not Jupiter", False),
        ("regex", "a|b+", "BBB", True),
        ("regex", "a|b+", "abb", False),
    ],
)
def test_an_answer_is_matched(match: Any, answer: str, action: str, right: bool | None) -> None:
    assert is_right(action, Question("?", answer, match)) is right


def test_tasks_contain_their_question_and_are_played_without_the_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, *many(100))
    tasks = QuestionTasks(file=file)
    Path(file).unlink()
    prompts = []
    with envkit.make("Questions-v0") as env:
        for split in tasks.splits:
            for index in range(tasks.count(split) or 0):
                task = tasks.task(split, index)
                prompt, _ = env.reset(seed=task.seed, options=dict(task.options))
                prompts.append(prompt)
                observation, reward, terminated, _, info = env.step(f"<answer>{prompt[8:-1]}</answer>")
                assert (reward, terminated, info["success"]) == (1.0, True, True)
                assert observation == f"The answer is {prompt[8:-1]}."
    assert sorted(prompts) == sorted(one["prompt"] for one in many(100))  # each question is in one split


def test_the_splits_follow_the_file_or_a_hash_with_at_least_one_question_in_eval(tmp_path: Path) -> None:
    by_hash = QuestionTasks(file=file_of(tmp_path, *many(100)))
    assert (by_hash.count("train") or 0) > 60
    assert min(by_hash.count("validation") or 0, by_hash.count("eval") or 0) > 2
    single = QuestionTasks(file=file_of(tmp_path, *many(1)))
    assert (single.splits, single.count("eval")) == (["eval"], 1)
    named = [*many(3, split="train"), {"prompt": "a", "answer": "b", "split": "eval"}]
    by_file = QuestionTasks(file=file_of(tmp_path, *named))
    assert (by_file.splits, by_file.count("train"), by_file.count("eval")) == (["train", "eval"], 3, 1)


def test_the_samples_are_announced(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    line = "Questions-v0 asks its 18 built-in examples; for questions of your own: --option file=FILE"
    assert QuestionTasks().notes() == caplog.messages == [line]
    (tmp_path / "q").write_text('{"prompt": "?", "answer": "2"}')
    assert QuestionTasks(file=str(tmp_path / "q")).notes() == []


def test_without_a_prompt_the_seed_chooses_a_question_of_the_file_or_of_the_samples(tmp_path: Path) -> None:
    file = file_of(tmp_path, *many(5))
    with envkit.make("Questions-v0", file=file) as env:
        prompts = [env.reset(seed=seed)[0] for seed in range(50)]
        assert prompts == [env.reset(seed=seed)[0] for seed in range(50)]
        assert set(prompts) == {one["prompt"] for one in many(5)}
    with envkit.make("Questions-v0") as env:
        assert {env.reset(seed=seed)[0] for seed in range(200)} == {one.prompt for one in SAMPLES}


def test_a_prompt_without_an_answer_is_refused_and_an_episode_has_one_step() -> None:
    with pytest.raises(OptionError, match="answer: must be a text that is not empty, got None"):
        Questions(prompt="1+1?")
    env = Questions(prompt="1+1?", answer="2")
    env.reset(seed=1)
    env.step("3")
    with pytest.raises(StepOrderError):
        env.step("2")
