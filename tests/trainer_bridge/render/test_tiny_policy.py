"""The tiny policy: an ordinary model folder with the vocabulary of its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from envkit.trainer_bridge.models.tiny_policy import make_policy, make_tokenizer
from envkit.trainer_bridge.render import PlainRenderer
from tests.trainer_bridge.models import WORDS, open_model


def test_words_are_tokens_and_boards_are_read_sign_by_sign() -> None:
    tokenizer = make_tokenizer(["up", "#P_\nB√T", "you see"])
    ids = tokenizer.encode("up #PB√\n", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["up", " ", "#", "P", "B", "√", "\n"]


def test_what_was_read_is_written_again_letter_by_letter() -> None:
    tokenizer: Any = make_tokenizer(["up", "#P_\nB√T", "you see, don't"])
    for text in ("#P_\nB√T", "you see, don't up\n\n<answer>up</answer>", "", " "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_a_move_of_several_words_or_signs_is_one_token_and_comes_back_as_it_was() -> None:
    moves = ("turn left", "turn left now", "A1", "A10", "move_up", "stop", "a.b*(c", "2")
    tokenizer: Any = make_tokenizer(["you may turn left, move up or A1", "#P_\n2"], moves)
    renderer = PlainRenderer(tokenizer)
    tokens = set()
    for move in moves:
        (token,) = renderer.demonstrate(f"<answer>{move}</answer>")
        assert token != tokenizer.unk_token_id
        assert renderer.action([token]) == f"<answer>{move}</answer>"
        tokens.add(token)
    assert len(tokens) == len(moves)


def test_a_word_that_was_never_seen_is_unknown_and_no_error() -> None:
    tokenizer = make_tokenizer(["up"])
    assert tokenizer.encode("zebra", add_special_tokens=False) == [tokenizer.unk_token_id]


def make(folder: Path, seed: int) -> torch.Tensor:
    make_policy(folder, WORDS, hidden_size=16, layers=2, heads=2, max_tokens=100, seed=seed)
    weight: torch.Tensor = torch.cat([weight.flatten() for weight in open_model(folder).parameters()])
    return weight.detach()


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = make(tmp_path / "a", seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(make(tmp_path / "b", seed=5), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(make(tmp_path / "c", seed=6), first)
