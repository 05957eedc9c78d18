"""What a teacher shows: the expert's moves and the right share of others, with the mask on its words alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice

import anyio
import pytest

from envkit import clock
from envkit.errors import ConfigError
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.warmup import demonstrations
from envkit.trainer_bridge.warmup.demonstrations import Lesson, Teacher
from envkit.types import Observation, Task
from envkit.wiring import environments
from tests.trainer_bridge.fakes import Answer, LetterRenderer, ScriptedHost, letters, text_of
from tests.trainer_bridge.models import chat_tokenizer

MOVES = ("u", "d", "l", "r")


class SignExpert:
    """Reads its best moves off the observation: ``"?ud"`` means up or down, and that it is tricky."""

    def moves(self, observation: Observation) -> Sequence[str]:
        return [sign for sign in observation.text if sign in MOVES]

    def is_tricky(self, observation: Observation) -> bool:
        return observation.text.startswith("?")

    def answer(self, move: str) -> str:
        return f"<{move}>"


def teacher(noise: float) -> Teacher:
    return Teacher(SignExpert(), LetterRenderer(), noise)


def see(text: str) -> Observation:
    return Observation(text, MOVES)


def numbered() -> Iterator[Task]:
    return (Task("World-v0", seed) for seed in count())


# --- Moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_a_teacher_makes_so_many_random_moves(noise: float) -> None:
    rng = random.Random(1)
    seen = Counter(teacher(noise).move(see("ul"), rng) for _ in range(4000))
    # A random move is one of four, and two of them are good as well.
    share = {move: (1 - noise) / 2 * (move in "ul") + noise / 4 for move in MOVES}
    assert {move: seen[move] / 4000 for move in MOVES} == {
        move: pytest.approx(value, abs=0.03) if value else 0 for move, value in share.items()
    }


def test_where_no_move_helps_a_teacher_plays_any() -> None:
    rng = random.Random(1)
    assert {teacher(0.0).move(see("dea"), rng) for _ in range(100)} == {"d"}
    assert {teacher(0.0).move(see("#"), rng) for _ in range(200)} == set(MOVES)


# --- Lessons ---------------------------------------------------------------------------------------------------------


def test_a_lesson_holds_the_state_as_a_first_and_as_a_later_turn_and_every_answer() -> None:
    assert teacher(0.5).lesson(see("?ul")) == Lesson(
        prompt=letters("[?ul]"),
        continuation=letters("[?ul]"),
        good=(letters("<u>"), letters("<l>")),
        possible=(letters("<u>"), letters("<d>"), letters("<l>"), letters("<r>")),
        is_tricky=True,
    )


def test_a_state_from_which_nobody_wins_is_no_lesson() -> None:
    assert teacher(0.5).lesson(see("#")) is None


def lessons_of(*texts: str, number: int, noise: float = 0.0) -> tuple[list[str], list[str]]:
    """Collect lessons in worlds that show these texts; return the states, and what the first world heard."""
    host = ScriptedHost(lambda task, time: [Answer(text) for text in texts] + [Answer("end", ends="terminated")])

    async def main() -> list[Lesson]:
        return await demonstrations.lessons(host, teacher(noise), numbered(), number, 5)

    found = clock.run(main, virtual=True)
    assert host.lent == 0
    return [text_of(lesson.prompt) for lesson in found], host.episodes[0].heard


def test_lessons_are_the_states_on_the_way_but_for_those_that_are_lost() -> None:
    states, heard = lessons_of("u", "#", "?l", number=5)
    assert states == ["[u]", "[?l]"] * 2 + ["[u]"]
    assert len(heard) == 3  # to the end of the episode, also from where there is no lesson
    assert (heard[0], heard[2]) == ("<u>", "<l>")


def test_no_more_lessons_than_asked_for() -> None:
    states, heard = lessons_of("u", "d", "l", number=2)
    assert states == ["[u]", "[d]"]
    assert heard == ["<u>", "<d>"]


def test_an_expert_who_never_knows_a_move_is_given_up() -> None:
    with pytest.raises(ConfigError) as caught:
        lessons_of("#", number=1)
    assert caught.value.problems == (
        (
            "warmup.kind: the expert of World-v0 knew no move in 1,000 episodes in a row; "
            "use none, with a pretrained engine.model"
        ),
    )


def test_an_expert_who_knows_a_move_now_and_then_is_not_given_up() -> None:
    host = ScriptedHost(lambda task, time: [Answer("u" if task.seed % 1000 == 999 else "#"), Answer(ends="terminated")])

    async def main() -> list[Lesson]:
        return await demonstrations.lessons(host, teacher(0.0), numbered(), 2, 5)

    assert len(clock.run(main, virtual=True)) == 2


def test_a_world_that_does_not_list_its_moves_can_be_shown_only_without_random_ones() -> None:
    assert teacher(0.0).move(Observation("u"), random.Random(1)) == "u"
    with pytest.raises(ConfigError, match=r"^warmup\.kind: .* lists no legal_moves in its info; add them, "):
        teacher(1.0).move(Observation("u"), random.Random(1))


def test_every_lesson_is_counted() -> None:
    counted: list[int] = []
    host = ScriptedHost(lambda task, time: [Answer("u")])

    async def main() -> None:
        await demonstrations.lessons(
            host, teacher(0.0), numbered(), 7, 5, on_lesson=lambda: counted.append(len(counted))
        )

    clock.run(main, virtual=True)
    assert counted == list(range(7))


def test_collecting_lessons_can_be_cancelled_although_the_world_never_waits() -> None:
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


# --- Answers ---------------------------------------------------------------------------------------------------------


def test_a_move_can_be_said_bare_to_the_policy_and_to_the_environment() -> None:
    host = ScriptedHost(lambda task, time: [Answer("u"), Answer(ends="terminated")])
    bare = Teacher(SignExpert(), LetterRenderer(), 0.0, is_bare=True)

    async def main() -> list[demonstrations.Demonstration]:
        return await demonstrations.demonstrations(host, bare, numbered(), 1, 3, max_turns=9, max_tokens=99)

    ((one,),) = (played.samples for played in clock.run(main, virtual=True))
    assert text_of(one.token_ids) == "[u]u"
    assert host.episodes[0].heard == ["u"]
    lesson = bare.lesson(see("?ul"))
    assert lesson is not None
    assert (lesson.good, lesson.possible) == ((letters("u"), letters("l")), tuple(map(letters, MOVES)))


def test_an_answer_that_the_policy_may_not_say_in_a_turn_is_refused() -> None:
    fits = Teacher(SignExpert(), LetterRenderer(), 0.0, turn_tokens=3)
    assert fits.tokens("u") == letters("<u>")
    long = Teacher(SignExpert(), LetterRenderer(), 0.0, turn_tokens=2)
    with pytest.raises(ConfigError) as caught:
        long.lesson(see("u"))
    (problem,) = caught.value.problems
    assert problem == (
        "rollout.turn_tokens: 2 is too small: the demonstrated answer <u> takes 3 tokens; raise it, or set "
        "warmup.answers to bare"
    )


def test_the_token_that_stops_a_completion_is_not_counted() -> None:
    renderer = ChatRenderer(chat_tokenizer())
    (move, stop) = Teacher(SignExpert(), renderer, 0.0, is_bare=True, turn_tokens=1).tokens("u")
    assert (renderer.text([move]), stop in renderer.stop) == ("u", True)


def test_questions_of_arithmetic_can_be_shown_without_noise() -> None:
    async def main() -> list[Lesson]:
        expert = environments.open_expert("Arithmetic-v0")
        tasks = (Task("Arithmetic-v0", seed, {"operands": [3, 3]}) for seed in count())
        async with environments.slots(1) as host:
            return await demonstrations.lessons(host, Teacher(expert, LetterRenderer(), 0.0, is_bare=True), tasks, 2, 1)

    assert {lesson.good for lesson in clock.run(main)} == {(letters("6"),)}


# --- Whole episodes --------------------------------------------------------------------------------------------------


def demonstrate(
    *answers: Answer, number: int = 1, noise: float = 0.0, max_turns: int = 9, max_tokens: int = 99
) -> tuple[list[str], ...]:
    """Return text, mask, turns and success of each demonstration, as text."""
    host = ScriptedHost(lambda task, time: answers)

    async def main() -> list[demonstrations.Demonstration]:
        return await demonstrations.demonstrations(
            host, teacher(noise), numbered(), number, 3, max_turns=max_turns, max_tokens=max_tokens
        )

    played = clock.run(main, virtual=True)
    assert len(played) == number
    assert host.lent == 0
    return tuple(
        [
            text_of(one.samples[0].token_ids),
            "".join(map(str, one.samples[0].mask)),
            "".join(map(str, one.samples[0].turn_ids)),
            str(one.success),
        ]
        for one in played
    )


def test_the_mask_is_one_on_the_teachers_words_and_nowhere_else() -> None:
    won = Answer("end", ends="terminated", info={"success": True})
    (shown,) = demonstrate(Answer("u"), Answer("!l"), won)
    assert shown == [
        "[u]<u>[!l]<l>",
        "0001110000111",
        "0000001111111",
        "True",
    ]


def test_an_episode_that_is_cut_off_is_shown_as_far_as_it_went() -> None:
    (shown,) = demonstrate(Answer("u"), max_turns=3)
    assert shown[0] == "[u]<u>" * 3
    assert shown[3] == "False"


def test_an_episode_that_gets_too_long_is_shown_as_far_as_it_fits() -> None:
    assert demonstrate(Answer("u"), max_tokens=13)[0][0] == "[u]<u>" * 2
    assert demonstrate(Answer("u"), max_tokens=12)[0][0] == "[u]<u>" * 2
    assert demonstrate(Answer("u"), max_tokens=11)[0][0] == "[u]<u>"


def test_with_a_history_of_one_turn_every_state_is_a_sample_of_its_own() -> None:
    renderer = ChatRenderer(chat_tokenizer(), system="Rules.", history=1)
    shown = Teacher(SignExpert(), renderer, 0.0, is_bare=True)
    host = ScriptedHost(lambda task, time: [Answer("u"), Answer("l"), Answer("d"), Answer(ends="terminated")])

    async def main() -> list[demonstrations.Demonstration]:
        return await demonstrations.demonstrations(host, shown, numbered(), 1, 3, max_turns=9, max_tokens=999)

    (played,) = clock.run(main, virtual=True)
    prompt = "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    assert [renderer.text(one.token_ids) for one in played.samples] == [prompt.format(move, move) for move in "uld"]
    assert [sum(one.mask) for one in played.samples] == [2, 2, 2]
    assert [one.mask[-2:] for one in played.samples] == [(1, 1)] * 3
    assert [set(one.turn_ids) for one in played.samples] == [{0}, {1}, {2}]


def test_a_lost_episode_is_no_success_whatever_happened_on_the_way() -> None:
    almost = Answer("u", info={"success": True})
    (shown,) = demonstrate(Answer("u"), almost, Answer("end", ends="terminated", info={"success": False}))
    assert shown[3] == "False"


def test_every_demonstration_plays_a_task_of_its_own() -> None:
    host = ScriptedHost(lambda task, time: [Answer("ul"), Answer(ends="terminated")])
    tasks = numbered()

    async def main() -> None:
        await demonstrations.demonstrations(host, teacher(0.0), tasks, 4, 3, max_turns=9, max_tokens=99)

    clock.run(main, virtual=True)
    assert [episode.heard[0] for episode in host.episodes] != ["<u>"] * 4
    assert next(tasks).seed == 4


def test_demonstrations_of_the_lake_are_the_same_again_and_worse_with_more_noise() -> None:
    async def main(noise: float) -> list[demonstrations.Demonstration]:
        expert = environments.open_expert("FrozenLake-v0")
        tasks = (Task("FrozenLake-v0", seed, {"instructions": False}) for seed in count())
        async with environments.slots(1) as host:
            shown = Teacher(expert, LetterRenderer(), noise)
            return await demonstrations.demonstrations(
                host, shown, islice(tasks, 60), 60, 4, max_turns=12, max_tokens=999
            )

    rates = []
    for noise in (0.0, 0.5, 1.0):
        played = clock.run(main, noise)
        assert played == clock.run(main, noise)
        rates.append(sum(one.success for one in played) / 60)
    assert rates[0] == 1.0
    assert rates[0] > rates[1] > rates[2] > 0
