"""`envkit model`: the models that have a name, and getting them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commands import called


def envkit(*words: str, cache: Path) -> tuple[int, str, str]:
    return called(*words, ENVKIT_CACHE=str(cache))


def test_the_list_says_which_models_are_fetched_and_where(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2-135m"
    expected = {
        "name": "smollm2-135m",
        "parameters": 134_515_008,
        "download_bytes": 93_000_000,
        "licence": "Apache-2.0",
        "fetched": False,
        "path": str(folder),
    }
    assert json.loads(envkit("model", "list", "--json", cache=tmp_path)[1]) == [expected]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert json.loads(envkit("model", "list", "--json", cache=tmp_path)[1]) == [{**expected, "fetched": True}]
    table = envkit("model", "list", cache=tmp_path)[1].splitlines()
    assert table[1].split() == ["smollm2-135m", "134,515,008", "93", "MB", "Apache-2.0", "yes", str(folder)]


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    done = envkit("model", "get", "smollm2-135m", cache=tmp_path)
    assert done == (0, f"{folder}\n", "smollm2-135m is already on this machine\n")


def test_a_file_with_a_model_that_is_not_fetched_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{env: {id: FrozenLake-v0}, engine: {model: smollm2-135m}}")
    problem = "smollm2-135m is not on this machine; run: "
    file, output = str(tmp_path / "run.yaml"), str(tmp_path / "run")
    for words, start in (
        (("check", file), f"engine.model: {problem}"),
        (("train", file, "--output", output), f"engine.model: {problem}"),
        (("eval", "FrozenLake-v0", "--policy", "model:smollm2-135m"), problem),
    ):
        code, _, errors = envkit(*words, cache=tmp_path)
        assert code == 2, errors
        assert errors.startswith(start)
        assert errors.endswith("envkit model get smollm2-135m\n")
    assert not (tmp_path / "run").exists()
