"""Text of agents, endpoints, servers and files cannot control the terminal, and damaged files end in one line."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest

from envkit.cli.tables import print_table
from envkit.environments.swe import tasks
from envkit.runs.display import StreamDisplay
from envkit.runs.files import replace_rows
from envkit.runs.printable import printable
from envkit.types import JSON, EpisodeRecord, Observation, Outcome, Step, StopReason, TurnRecord
from tests.cli.commands import called, envkit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cli-text")]

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
QUESTIONS = ["eval", "Questions-v0", "--policy", "random"]
MANY = "9" * 5000
DEEP = "[" * 3_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("one\n\ttwo", "one\n\ttwo"),
        ("\r\x7f\x85\u2028\u2066\udc80", r"\r\x7f\x85\u2028\u2066\udc80"),
        ("é 語 │ 😀\xa0", "é 語 │ 😀\xa0"),
    ],
)
def test_characters_that_control_a_terminal_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_tables_and_displays_escape_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "SEEN"), [(HOSTILE, "one\ntwo")])
    assert capsys.readouterr().out.splitlines()[1] == rf"{SHOWN}  one\ntwo"
    display = StreamDisplay(stream := StringIO(), every_s=0)
    display.announce(HOSTILE)
    display.phase(HOSTILE, 1)
    display.advance(1, **{HOSTILE: HOSTILE})
    display.close()
    assert SHOWN in stream.getvalue()
    assert not {"\x07", "\x9b", "\u202e"} & set(stream.getvalue())


def recorded(folder: Path) -> None:
    turn = TurnRecord.of(HOSTILE, Step(Observation(HOSTILE), 0.0, False, False, {HOSTILE: HOSTILE}))
    options: dict[str, JSON] = {HOSTILE: HOSTILE}
    outcomes = [
        Outcome.score(StopReason.TERMINATED, 0.0, {HOSTILE: 1.0}),
        Outcome.void(StopReason.SANDBOX_LOST, HOSTILE),
    ]
    replace_rows(
        folder / "episodes.jsonl",
        [
            EpisodeRecord(
                env_id="FrozenLake-v0",
                seed=1,
                options=options,
                index=0,
                member=member,
                train_step=None,
                outcome=outcome,
                start=Observation(HOSTILE),
                start_info={"level": {"shortest": HOSTILE}},
                turns=(turn,),
            )
            for member, outcome in enumerate(outcomes)
        ],
    )


def wrote(name: str, content: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).write_text(content)

    return prepare


def nothing(folder: Path) -> None:
    return


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (recorded, ["show", "episodes.jsonl"]),
        (recorded, ["rescore", "episodes.jsonl"]),
        (wrote("run.yaml", f'"{HOSTILE.encode("unicode_escape").decode()}": 1'), ["check", "run.yaml"]),
        (
            wrote("q.jsonl", '{"a\\u001b[2J": 1}'),
            [*QUESTIONS, "--option", "file=q.jsonl"],
        ),
        (nothing, ["eval", "FrozenLake-v0", "--policy", HOSTILE]),
        (nothing, ["eval", HOSTILE, "--policy", "random"]),
        (nothing, ["eval", "FrozenLake-v0", "--policy", "random", "--option", f"{HOSTILE}=1"]),
        (nothing, ["show", f"{HOSTILE}\nok"]),
    ],
)
def test_no_command_prints_control_characters(
    prepare: Callable[[Path], None], words: Sequence[str], tmp_path: Path
) -> None:
    prepare(tmp_path)
    _, out, err = called(*words, cwd=tmp_path, NO_COLOR="1")
    assert "x1b" in out + err
    assert "Traceback" not in err
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out + err)
    assert "ok" not in err.splitlines()


def test_a_stream_that_lacks_characters_gets_escapes(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / "語.jsonl").write_bytes((tmp_path / "episodes.jsonl").read_bytes())
    code, out, err = envkit("show", "語.jsonl", cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (code, err) == (0, "")
    assert r"\u8a9e.jsonl" in out


@pytest.mark.parametrize(
    ("prepare", "words", "problem"),
    [
        (wrote("run.yaml", f"env: {DEEP}"), ["check", "run.yaml"], "nested too deeply"),
        (wrote("run.yaml", f"seed: {MANY}"), ["check", "run.yaml"], "an integer with too many digits"),
        (nothing, ["eval", "FrozenLake-v0", "--policy", "random", "--option", f"size={MANY}"], "is not YAML"),
        (
            wrote("q.jsonl", DEEP),
            [*QUESTIONS, "--option", "file=q.jsonl"],
            "nested too deeply",
        ),
        (wrote("rows.json", f"[{MANY}]"), ["tasks", "SWE-v0", "import", "rows.json", "--out", "out"], "rows.json:1"),
        (wrote("rows.json", DEEP), ["tasks", "SWE-v0", "import", "rows.json", "--out", "out"], "rows.json:1"),
        (wrote("config.json", DEEP), ["eval", "FrozenLake-v0", "--policy", "model:."], "cannot load"),
        (wrote("m.gguf", "GGUF"), ["eval", "FrozenLake-v0", "--policy", "model:m.gguf"], "cannot read this GGUF file"),
    ],
)
def test_a_damaged_file_ends_in_one_line(
    prepare: Callable[[Path], None], words: Sequence[str], problem: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    code, _, err = called(*words, cwd=tmp_path)
    assert (code, len(err.splitlines())) == (2, 1), err[-500:]
    assert problem in err


def test_a_compressed_file_of_rows_is_not_unpacked_without_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_MAX_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "rows.gz").write_bytes(gzip.compress(b"\n" * (2 << 20)))
    code, _, err = called("tasks", "SWE-v0", "import", "rows.gz", "--out", "out", cwd=tmp_path)
    assert (code, err) == (2, "rows.gz: more than 1 MiB of data; split the file\n")
