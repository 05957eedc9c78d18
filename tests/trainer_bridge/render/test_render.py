"""Rendering: sent and sampled tokens never change in later turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from envkit.protocols import Renderer
from envkit.trainer_bridge.models.tiny_policy import make_tokenizer
from envkit.trainer_bridge.render import PlainRenderer
from envkit.types import Exchange, Observation
from tests.trainer_bridge.models import WORDS, chat_tokenizer

TOKENIZER: Any = make_tokenizer(WORDS)
CHAT: Any = chat_tokenizer()


def see(text: str) -> Observation:
    return Observation(text)


def words(token_ids: Sequence[int], tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))


def ids_of(text: str, tokenizer: Any = TOKENIZER) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def after(renderer: Renderer, completion: Sequence[int], text: str) -> tuple[int, ...]:
    """The tokens that follow a completion."""
    prompt = renderer.extend([Exchange(see("?"), tuple(completion))], see(text))
    assert not prompt.starts_sample
    return prompt.ids


# --- Plain -----------------------------------------------------------------------------------------------------------


def test_an_episode_reads_as_observations_and_answers() -> None:
    renderer = PlainRenderer(TOKENIZER)
    ids = renderer.open(see("#P_\n#T#"))
    for answer, text in (("up", "#_P\n#T#"), ("right", "#_#")):
        ids += ids_of(answer) + after(renderer, ids_of(answer), text)
    assert words(ids) == ("<s>#P_\n#T#\n<answer>up</answer>#_P\n#T#\n<answer>right</answer>#_#\n<answer>")
    assert TOKENIZER.unk_token_id not in ids


def test_a_completion_that_closes_its_answer_is_not_closed_again() -> None:
    renderer = PlainRenderer(TOKENIZER)
    (close,) = renderer.stop
    assert words(after(renderer, (*ids_of("up"), close), "#")) == "#\n<answer>"
    assert words(after(renderer, ids_of("up"), "#")) == "</answer>#\n<answer>"
    assert words(after(renderer, (), "#")) == "</answer>#\n<answer>"


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("up", "<answer>up</answer>"),
        ("up</answer>", "<answer>up</answer>"),
        ("</answer>", "<answer></answer>"),
        ("", "<answer></answer>"),
        ("up#\ndown", "<answer>up#\ndown</answer>"),
        ("<answer>up", "<answer><answer>up</answer>"),
    ],
)
def test_an_action_is_the_completion_between_its_tags(completion: str, action: str) -> None:
    assert PlainRenderer(TOKENIZER).action(ids_of(completion)) == action


def test_a_demonstrated_move_is_one_token() -> None:
    renderer, move = PlainRenderer(TOKENIZER), "up"
    shown = renderer.demonstrate(f"<answer>{move}</answer>")
    assert shown == ids_of(move)
    assert len(shown) == 1
    assert renderer.action(shown) == f"<answer>{move}</answer>"
    assert renderer.demonstrate(move) == shown


def test_a_tokenizer_without_a_token_for_the_tags_has_no_stop_and_frames_the_same_words() -> None:
    renderer = PlainRenderer(CHAT)
    assert renderer.stop == ()
    up = ids_of("up", CHAT)
    closed = ids_of("up</answer>", CHAT)
    ids = renderer.open(see("a wall")) + up + after(renderer, up, "you") + closed + after(renderer, closed, "a")
    assert words(ids, CHAT) == "a wall\n<answer>up</answer>you\n<answer>up</answer>a\n<answer>"
    assert renderer.action(closed) == "<answer>up</answer>"


def test_an_end_of_text_stops_the_policy_where_the_closing_tag_is_several_tokens() -> None:
    renderer = PlainRenderer(CHAT, eos_ids=[CHAT.eos_token_id])
    assert renderer.stop == (CHAT.eos_token_id,)
    ended = (*ids_of("up", CHAT), CHAT.eos_token_id)
    assert renderer.action(ended) == "<answer>up</answer>"
    assert words(after(renderer, ended, "a"), CHAT) == "</answer>a\n<answer>"
    assert PlainRenderer(TOKENIZER, eos_ids=[5]).stop == ids_of("</answer>")


def test_a_demonstration_ends_with_the_tag_where_no_token_stops_the_policy() -> None:
    # Otherwise a policy that imitates it goes on after its move, and its action is no move.
    renderer = PlainRenderer(CHAT)
    shown = renderer.demonstrate("<answer>up</answer>")
    assert words(shown, CHAT) == "up</answer>"
    assert renderer.action(shown + ids_of("down", CHAT)) == "<answer>up</answer>"
