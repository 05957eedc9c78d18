r"""Questions: one question, one answer in any text; the questions come from a file.

Observation  the prompt; after the answer, the reference answer
Actions      any text. The answer is what ``<answer>...</answer>`` or ``\boxed{...}`` enclose, or else the whole text
Reward       1.0 for a right answer, otherwise 0.0
Ends         terminated after one answer
Options      see `QuestionOptions`
Info         ``action_is_valid`` (whether the text has an answer, which must be a number to match a number), ``success``

The reference answer is matched without regard to letter case: ``exact`` compares the texts, ``number`` the last numbers
in both, ``contains`` searches for the reference answer, and ``regex`` requires that a regular expression matches the
whole answer. The default is ``number`` if the reference answer is a number, otherwise ``exact``.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast, get_args

import gymnasium

from envkit.env import check_seed
from envkit.errors import ConfigError, OptionError, StepOrderError, UsageError, did_you_mean
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info, Options, Task, stable_hash

from .answer import answer_text, parse_number, read_number
from .options import check_choice, check_path, check_split, override
from .split import SPLITS, split_of

Match: TypeAlias = Literal["exact", "number", "contains", "regex"]

_log = logging.getLogger(__name__)

_MAX_TEXT = 1 << 20
_MAX_PROBLEMS = 10


class Question(NamedTuple):
    """A question. `split` is None if the file does not name the splits."""

    prompt: str
    answer: str
    match: Match
    split: str | None = None


SAMPLES = tuple(Question(f"What is {n} times {n}?", str(n * n), "number") for n in range(2, 20))
"""The questions of an environment without a file."""
_ONLY_SAMPLES = f"Questions-v0 asks its {len(SAMPLES)} built-in examples; for questions of your own: --option file=FILE"


def read_questions(file: str) -> Sequence[Question]:
    """Read questions from a file with one JSON object per line: ``{"prompt": "What is 1+1?", "answer": "2"}``.

    Optional keys are ``match`` and ``split`` (``train``, ``validation`` or ``eval``), which all lines have or none. An
    answer may also be a number. Empty lines are skipped.

    Raises:
        UsageError: The file cannot be read.
        ConfigError: Lines are invalid. The error has at most ten problems, each of which begins with ``FILE:LINE``.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"file: cannot read {file}: {error}") from None
    questions: list[Question] = []
    answers: dict[str, tuple[str, Match]] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                questions.append(_question_of(line))
                _, answer, match, _ = questions[-1]
                if answers.setdefault(questions[-1].prompt, (answer, match)) != (answer, match):
                    raise ValueError("prompt: an earlier line has the same prompt with another answer")
                if (questions[-1].split is None) != (questions[0].split is None):
                    raise ValueError("split: give every question of the file a split, or none")
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
    if problems or not questions:
        raise ConfigError(problems[:_MAX_PROBLEMS] or [f"{file}: the file has no questions"])
    return questions


def _question_of(line: str) -> Question:
    """Return the question in a line of a file; raise `ValueError` if the line is invalid."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f'must be an object, such as {{"prompt": "What is 1+1?", "answer": "2"}}, got {line[:60]}')
    for name in entry:
        if name not in Question._fields:
            raise OptionError(name, f"no such key{did_you_mean(name, Question._fields)}")
    number = entry.get("answer")
    if type(number) is int or (type(number) is float and math.isfinite(number)):
        entry["answer"] = str(number)
    check_split(entry.get("split"))
    return _checked(entry.get("prompt"), entry.get("answer"), entry.get("match"), entry.get("split"))


def _checked(prompt: object, answer: object, match: object, split: str | None = None) -> Question:
    """Return a question with valid texts, and with the default match if `match` is None."""
    for name, value in (("prompt", prompt), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise OptionError(name, f"must be a text that is not empty, got {value!r}")
    answer = str(answer).strip()
    if match is None:
        match = "exact" if read_number(answer) is None else "number"
    check_choice("match", match, get_args(Match))
    if match == "number" and parse_number(answer) is None:
        raise OptionError("answer", f"must contain a number if the match is 'number', got {answer!r}")
    if match == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            raise OptionError("answer", f"must be a regular expression ({error}), got {answer!r}") from None
    return Question(str(prompt), answer, cast("Match", match), split)


def is_right(action: str, question: Question) -> bool | None:
    """Return whether the text of a model has the right answer; None if it has no answer, or must have a number."""
    if question.match == "number":
        number = parse_number(action)
        return None if number is None else number == parse_number(question.answer)
    text, answer = answer_text(action).strip(), question.answer
    if not text:
        return None
    if question.match == "regex":
        return re.fullmatch(answer, text, re.IGNORECASE) is not None
    return answer.lower() in text if question.match == "contains" else answer.lower() == text


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Options of the questions.

    Attributes:
        file: A file that `read_questions` can read, in which the seed chooses a question; None for a few samples, with
            a warning in the log and in the result of an evaluation.
        prompt: The question itself, instead of one of the file. The tasks of `QuestionTasks` have this option.
        answer: The reference answer to `prompt`.
        match: How the answer to `prompt` is matched; None for the default.
    """

    file: str | None = None
    prompt: str | None = None
    answer: str | None = None
    match: Match | None = None

    def __post_init__(self) -> None:
        check_path("file", self.file)
        if self.prompt is not None:
            _checked(self.prompt, self.answer, self.match)

    def questions(self) -> Sequence[Question]:
        """Return the questions to choose from."""
        if self.prompt is not None:
            return [_checked(self.prompt, self.answer, self.match)]
        if self.file is not None:
            return read_questions(self.file)
        _log.warning(_ONLY_SAMPLES)
        return SAMPLES


class QuestionTasks:
    """The questions of a file as tasks with splits; see `envkit.protocols.TaskSet`.

    If the file does not name the splits, a hash of the prompt does: 80% train, 10% validation, 10% eval, but at least
    one question in eval. Each task contains its question, so that only this process reads the file.

    Args:
        options: Options of the environment.

    Raises:
        UsageError, ConfigError: As for `read_questions`.
    """

    def __init__(self, **options: JSON) -> None:
        questions = override(QuestionOptions(), options).questions()
        self._notes = [_ONLY_SAMPLES] if questions is SAMPLES else []
        splits = {one.prompt: one.split or split_of(one.prompt) for one in questions}
        if questions[0].split is None and "eval" not in splits.values():
            splits[max(splits, key=stable_hash)] = "eval"
        self._by_split: Mapping[str, Sequence[Question]] = {
            split: [one for one in questions if (one.split or splits[one.prompt]) == split] for split in SPLITS
        }

    @property
    def splits(self) -> Sequence[str]:
        """The splits that have questions."""
        return [split for split, some in self._by_split.items() if some]

    def count(self, split: str) -> int | None:
        return len(self._by_split[split])

    def notes(self) -> Sequence[str]:
        return self._notes

    def task(self, split: str, index: int) -> Task:
        question = self._by_split[split][index]
        return Task("Questions-v0", 0, {"prompt": question.prompt, "answer": question.answer, "match": question.match})


class Questions(gymnasium.Env[str, str]):
    """An environment with one question per episode.

    Args:
        options: See `QuestionOptions`; ``reset(options=...)`` overrides single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    metadata = {  # noqa: RUF012 - as Gymnasium's
        "render_modes": [],
        "metrics": {"action_is_valid": "mean", "success": "last"},
    }

    options: ClassVar[Options] = asdict(QuestionOptions())

    def __init__(self, *, render_mode: str | None = None, **options: JSON) -> None:
        if render_mode is not None:
            raise OptionError("render_mode", f"{render_mode!r} is not supported: there is nothing to draw; use None")
        self.observation_space = Utf8Text(_MAX_TEXT)
        self.action_space = Utf8Text(_MAX_TEXT)
        self._defaults = override(QuestionOptions(), options)
        self._source: QuestionOptions | None = None
        self._questions: Sequence[Question] = ()
        self._question: Question | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode."""
        self._question = None
        chosen = override(self._defaults, options)
        check_seed(seed)
        super().reset(seed=seed)
        if chosen != self._source:
            self._questions, self._source = chosen.questions(), chosen
        drawn = int(self.np_random.integers(1 << 31)) if seed is None else stable_hash("Questions", int(seed))
        self._question = self._questions[drawn % len(self._questions)]
        return self._question.prompt, {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Grade the answer and end the episode."""
        question, self._question = self._question, None
        if question is None:
            raise StepOrderError("step before reset, or after the end of the episode")
        if not isinstance(action, str):
            raise UsageError(f"an action must be text, got {action!r}")
        success = is_right(action, question)
        info: Info = {"action_is_valid": success is not None, "success": bool(success)}
        return f"The answer is {question.answer}.", float(bool(success)), True, False, info
