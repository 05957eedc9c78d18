"""Demonstrations: the expert's moves, a share of random moves, and a mask on the teacher's tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

import anyio
import pytest

from envkit import clock
from envkit.errors import ConfigError
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.sources import demonstrations
from envkit.trainer_bridge.sources.demonstrations import Lesson, Teacher
from envkit.types import Observation, Task
from envkit.wiring import environments
from tests.trainer_bridge.fakes import Answer, LetterRenderer, ScriptedHost, letters, text_of
from tests.trainer_bridge.models import chat_tokenizer

MOVES = ("u", "d", "l", "r")


LIMITS = RolloutLimits(max_turns=9, max_tokens=999)


class SignExpert:
    """Takes its best moves from the observation: ``"?ud"`` means up or down, and that it is tricky."""

    def moves(self, observation: Observation) -> Sequence[str]:
        return [sign for sign in observation.text if sign in MOVES]

    def is_hazardous(self, observation: Observation) -> bool:
        return observation.text.startswith("?")

    def answer(self, move: str) -> str:
        return f"<{move}>"


def teacher(noise: float) -> Teacher:
    return Teacher(SignExpert(), LetterRenderer(), noise)


def see(text: str) -> Observation:
    return Observation(text, MOVES)


def numbered() -> Iterator[Task]:
    return (Task("Scripted-v0", seed) for seed in count())


# --- Moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_teacher_makes_the_requested_share_of_random_moves(noise: float) -> None:
    rng = random.Random(1)
    seen = Counter(teacher(noise).move(see("ul"), rng) for _ in range(4000))
    # A random move is one of four, and two of them are good as well.
    share = {move: (1 - noise) / 2 * (move in "ul") + noise / 4 for move in MOVES}
    assert {move: seen[move] / 4000 for move in MOVES} == {
        move: pytest.approx(value, abs=0.03) if value else 0 for move, value in share.items()
    }


def test_without_a_good_move_a_teacher_plays_any_move() -> None:
    rng = random.Random(1)
    assert {teacher(0.0).move(see("dea"), rng) for _ in range(100)} == {"d"}
    assert {teacher(0.0).move(see("#"), rng) for _ in range(200)} == set(MOVES)


# --- Lessons ---------------------------------------------------------------------------------------------------------


def test_a_lesson_has_the_state_as_first_and_as_later_turn_and_all_answers() -> None:
    assert teacher(0.5).lesson(see("?ul")) == Lesson(
        prompt=letters("[?ul]"),
        continuation=letters("[?ul]"),
        good=(letters("<u>"), letters("<l>")),
        possible=(letters("<u>"), letters("<d>"), letters("<l>"), letters("<r>")),
        is_hazardous=True,
    )


def lessons_of(*texts: str, number: int, noise: float = 0.0) -> tuple[list[str], list[str]]:
    """Collect lessons in environments with these texts; return the states, and the actions in the first one."""
    host = ScriptedHost(lambda task, time: [Answer(text) for text in texts] + [Answer("end", ends="terminated")])

    async def main() -> list[Lesson]:
        return await demonstrations.lessons(host, teacher(noise), numbered(), number, 5)

    found = clock.run(main, virtual=True)
    assert host.lent == 0
    return [text_of(lesson.prompt) for lesson in found], host.episodes[0].actions


def test_lessons_are_the_visited_states_except_lost_ones() -> None:
    states, actions = lessons_of("u", "#", "?l", number=5)
    assert states == ["[u]", "[?l]"] * 2 + ["[u]"]
    assert len(actions) == 3  # to the end of the episode, also from where there is no lesson
    assert (actions[0], actions[2]) == ("<u>", "<l>")


def test_an_expert_without_any_move_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        lessons_of("#", number=1)
    assert caught.value.problems == (
        (
            "imitation.kind: the expert of Scripted-v0 knew no move in 1,000 episodes in a row; "
            "set it to none, and use a pretrained engine.model"
        ),
    )


def test_an_environment_without_legal_moves_needs_demonstrations_without_random_moves() -> None:
    assert teacher(0.0).move(Observation("u"), random.Random(1)) == "u"
    with pytest.raises(ConfigError, match=r"^imitation\.kind: .* lists no legal_moves in its info; add them, "):
        teacher(1.0).move(Observation("u"), random.Random(1))


def test_collecting_lessons_can_be_cancelled_if_the_environment_never_yields() -> None:
    async def main() -> bool:
        expert = environments.open_expert("FrozenLake-v0")
        tasks = (Task("FrozenLake-v0", seed, {"instructions": False}) for seed in count())
        async with environments.slots(1) as host, anyio.create_task_group() as group:

            def stop_after_a_few() -> None:
                group.cancel_scope.cancel()

            await demonstrations.lessons(
                host, Teacher(expert, LetterRenderer(), 0.5), tasks, 10**9, 0, on_lesson=stop_after_a_few
            )
        return group.cancel_scope.cancelled_caught

    assert clock.run(main)


class SeedExpert(SignExpert):
    """Knows a move only for a task: the letter that the seed chooses, once the episode has shown it everything."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.seen: list[str] = []

    def for_task(self, task: Task) -> SeedExpert:
        return SeedExpert(task.seed)

    def moves(self, observation: Observation) -> Sequence[str]:
        if self.seed is None:
            return []
        self.seen += [observation.text] if observation.text not in self.seen else []
        return [MOVES[(self.seed + len(self.seen)) % len(MOVES)]]


def test_an_expert_of_tasks_demonstrates_each_task_anew() -> None:
    script = [Answer("a"), Answer("b"), Answer(ends="terminated")]
    host = ScriptedHost(lambda task, time: script)
    shown = Teacher(SeedExpert(), LetterRenderer(), 0.0, is_bare=True)

    async def main() -> tuple[list[Lesson], list[demonstrations.Demonstration]]:
        found = await demonstrations.lessons(host, shown, numbered(), 4, 0)
        limits = LIMITS
        return found, await demonstrations.demonstrations(host, shown, numbered(), 2, 0, limits)

    found, _ = clock.run(main, virtual=True)
    assert [lesson.good for lesson in found] == [(letters(move),) for move in "dllr"]
    assert [episode.actions for episode in host.episodes] == [["d", "l"], ["l", "r"]] * 2


# --- Answers ---------------------------------------------------------------------------------------------------------


def test_a_bare_move_goes_to_the_policy_and_to_the_environment() -> None:
    host = ScriptedHost(lambda task, time: [Answer("u"), Answer(ends="terminated")])
    bare = Teacher(SignExpert(), LetterRenderer(), 0.0, is_bare=True)

    async def main() -> list[demonstrations.Demonstration]:
        return await demonstrations.demonstrations(host, bare, numbered(), 1, 3, LIMITS)

    ((one,),) = (played.samples for played in clock.run(main, virtual=True))
    assert text_of(one.token_ids.tolist()) == "[u]u"
    assert host.episodes[0].actions == ["u"]
    lesson = bare.lesson(see("?ul"))
    assert lesson is not None
    assert (lesson.good, lesson.possible) == ((letters("u"), letters("l")), tuple(map(letters, MOVES)))


def test_an_answer_above_the_turn_token_limit_is_refused() -> None:
    fits = Teacher(SignExpert(), LetterRenderer(), 0.0, turn_tokens=3)
    assert fits.tokens("u") == letters("<u>")
    long = Teacher(SignExpert(), LetterRenderer(), 0.0, turn_tokens=2)
    with pytest.raises(ConfigError) as caught:
        long.lesson(see("u"))
    (problem,) = caught.value.problems
    assert problem == (
        "rollout.turn_tokens: 2 is too small: the demonstrated answer <u> takes 3 tokens; raise it, or set "
        "imitation.answers to bare"
    )


# --- Whole episodes --------------------------------------------------------------------------------------------------


def demonstrate(
    *answers: Answer, number: int = 1, noise: float = 0.0, max_turns: int = 9, max_tokens: int = 99
) -> tuple[list[str], ...]:
    """Return text, mask, turns and success of each demonstration, as text."""
    host = ScriptedHost(lambda task, time: answers)

    async def main() -> list[demonstrations.Demonstration]:
        return await demonstrations.demonstrations(
            host, teacher(noise), numbered(), number, 3, RolloutLimits(max_turns=max_turns, max_tokens=max_tokens)
        )

    played = clock.run(main, virtual=True)
    assert len(played) == number
    assert host.lent == 0
    return tuple(
        [
            text_of(one.samples[0].token_ids.tolist()),
            "".join(map(str, one.samples[0].mask.astype(int))),
            "".join(map(str, one.samples[0].turn_ids)),
            str(one.success),
        ]
        for one in played
    )


def test_the_mask_is_one_exactly_on_the_teachers_tokens() -> None:
    won = Answer("end", ends="terminated", info={"success": True})
    (shown,) = demonstrate(Answer("u", info={"metrics": {"success": "last"}}), Answer("!l"), won)
    assert shown == [
        "[u]<u>[!l]<l>",
        "0001110000111",
        "0000001111111",
        "True",
    ]


def test_a_too_long_episode_is_demonstrated_as_far_as_it_fits() -> None:
    assert demonstrate(Answer("u"), max_tokens=13)[0][0] == "[u]<u>" * 2
    assert demonstrate(Answer("u"), max_tokens=12)[0][0] == "[u]<u>" * 2
    assert demonstrate(Answer("u"), max_tokens=11)[0][0] == "[u]<u>"


class ToolExpert(SignExpert):
    """Takes the moves of `SignExpert` with a tool."""

    def answer(self, move: str) -> str:
        return f'{{"name": "go", "arguments": {{"to": "{move}"}}}}'


def test_lessons_and_demonstrations_show_the_system_prompt_and_calls_of_the_tools_of_an_episode() -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": {}}}
    first = Answer("u", system="Rules.", tools=(tool,))
    host = ScriptedHost(lambda task, time: [first, Answer("l", role="tool"), Answer(ends="terminated")])
    renderer = ChatRenderer(chat_tokenizer())
    shown = Teacher(ToolExpert(), renderer, 0.0)

    async def main() -> tuple[list[Lesson], list[demonstrations.Demonstration]]:
        lessons = await demonstrations.lessons(host, shown, numbered(), 1, 3)
        played = await demonstrations.demonstrations(host, shown, numbered(), 1, 3, LIMITS)
        return lessons, played

    (lesson,), (played,) = clock.run(main, virtual=True)
    call = '<tool_call>{"name": "go", "arguments": {"to": "%s"}}</tool_call><|im_end|>'
    (sample,) = played.samples
    assert renderer.text(lesson.prompt).startswith("<|im_start|>system\nRules.\n\nYou can call these tools:\n")
    assert renderer.text(lesson.good[0]) == call % "u"
    assert renderer.text(sample.token_ids.tolist()[: len(lesson.prompt)]) == renderer.text(lesson.prompt)
    assert renderer.text(sample.token_ids[sample.mask].tolist()) == call % "u" + call % "l"
    assert "<|im_start|>tool\nl<|im_end|>" in renderer.text(sample.token_ids.tolist())
