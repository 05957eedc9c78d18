"""The record of a run: content of the files, kills, locking, and full disks."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from envkit.errors import ConfigError, UsageError
from envkit.runs.files import read_rows
from envkit.trainer_bridge.run_folder.record import RunRecord
from tests.trainer_bridge.run_folder.disk import FULL, full_disk

CONFIG = "seed: 7\nenv:\n  id: Sokoban-v0\n  options: {}\ntrainer:\n  steps: 10\n  learning_rate: 0.0003\n"


def create(folder: Path, *, force: bool = False) -> RunRecord:
    return RunRecord.create(folder, CONFIG, force=force)


def resume(folder: Path, config: str = CONFIG, *, step: int = 0) -> RunRecord:
    return RunRecord.resume(folder, config, step=step)


def run_of(folder: Path, *, steps: int, tensorboard: bool = False) -> None:
    """Create the folder of a run with a number of steps and a checkpoint."""
    record = create(folder)
    if tensorboard:
        from envkit.trainer_bridge.run_folder.tensorboard import EventFile

        record.add(EventFile(folder / "tensorboard", first_step=0))
    for step in range(1, steps + 1):
        record.step(step, {"success": step / 10})
        record.evaluation(step, {"eval_success": step / 20})
        record.trajectories(step, [])
    (record.checkpoints / f"step-{steps}").mkdir()
    record.close()


def steps_in(path: Path) -> list[object]:
    return [row["step"] for row in read_rows(path)]


def test_a_step_is_a_line_with_its_floats_to_the_last_digit_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    record = create(tmp_path / "run")
    record.step(1, {"return": 0.1 + 0.2, "kl": 1e-300, "lost": math.nan, "loss": math.inf})
    record.close()

    line = (tmp_path / "run/metrics.jsonl").read_text()
    assert line == '{"step":1,"return":0.30000000000000004,"kl":1e-300,"lost":null,"loss":null}\n'


def test_a_folder_that_holds_a_run_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    run_of(tmp_path, steps=2)
    with pytest.raises(UsageError, match=rf"{tmp_path}: already holds a run; .*--resume .*--force"):
        create(tmp_path)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_force_removes_the_files_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    run_of(tmp_path, steps=3, tensorboard=True)
    mine = ["notes.txt", "plots/mine.png", "checkpoints/best/weights", "trajectories/labelled.jsonl"]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")

    record = create(tmp_path, force=True)
    record.close()

    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    own = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "schedule.jsonl", "run.lock", "format.json")
    assert left == {*mine, *own}
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/step-5"])
def test_force_does_not_replace_foreign_files_of_the_same_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{tmp_path}: {name} exists but belongs to no run; .*--output"):
        create(tmp_path, force=True)
    assert (tmp_path / name).read_text() == "mine"


def test_resume_drops_what_is_later_than_the_checkpoint(tmp_path: Path) -> None:
    run_of(tmp_path, steps=5)
    record = resume(tmp_path, step=3)
    record.step(4, {"success": 1.0})
    record.close()

    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert steps_in(tmp_path / "evaluations.jsonl") == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == [f"step-{n}.jsonl" for n in (1, 2, 3)]


@pytest.mark.parametrize("torn", [b'{"step":3,"succ', b"\x00\x00\x00\x00", b'{"step":3}'])
def test_a_last_line_cut_short_by_a_kill_does_not_stop_a_resume(tmp_path: Path, torn: bytes) -> None:
    run_of(tmp_path, steps=2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    record = resume(tmp_path, step=2)
    record.step(3, {"success": 0.5})
    record.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_resume_drops_an_evaluation_after_the_checkpoint(tmp_path: Path) -> None:
    run_of(tmp_path, steps=5)
    RunRecord.resume(tmp_path, CONFIG, step=3, is_evaluated=False).close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "evaluations.jsonl") == [1, 2]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run_of(tmp_path, steps=2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"not json\n" + path.read_bytes())
    with pytest.raises(UsageError, match=r"metrics\.jsonl: line 1 is damaged"):
        resume(tmp_path, step=2)


WRITER = """
import sys
from pathlib import Path
from envkit.trainer_bridge.run_folder.record import RunRecord
record = RunRecord.create(Path(sys.argv[1]), "seed: 7", force=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_the_same_folder_is_refused_with_the_process_id(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            refusal = rf"{tmp_path}: in use by another run \(process {writer.pid}\)"
            with pytest.raises(UsageError, match=refusal):
                create(tmp_path, force=True)
            with pytest.raises(UsageError, match=refusal):
                resume(tmp_path, "seed: 7")
        finally:
            writer.kill()
    create(tmp_path, force=True).close()  # a killed process holds no lock


def test_a_key_that_the_run_did_not_know_has_its_default(tmp_path: Path) -> None:
    create(tmp_path).close()
    new = f"{CONFIG}\nseen_first_now: null\n"
    with pytest.raises(UsageError, match="seen_first_now: the run has no value, the file has null"):
        resume(tmp_path, new)
    RunRecord.resume(tmp_path, new, step=0, complete=lambda text: f"{text}\nseen_first_now: null\n").close()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.0003", "0.001", "trainer.learning_rate: the run has 0.0003, the file has 0.001; use the old value"),
        ("steps: 10", "steps: 9", "trainer.steps: the run has 10, the file has 9;"),
        ("options: {}", "options: {size: 6}", "env.options.size: the run has no value, the file has 6;"),
    ],
)
def test_a_resume_with_another_configuration_names_the_key_and_both_values(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    run_of(tmp_path, steps=1)
    with pytest.raises(UsageError) as caught:
        resume(tmp_path, CONFIG.replace(old, new), step=1)
    assert str(caught.value).startswith(message)


def test_a_run_with_keys_that_are_gone_is_refused_with_their_new_names(tmp_path: Path) -> None:
    create(tmp_path).close()

    def complete(text: str) -> str:
        raise ConfigError(["trainer.threads: no longer exists; use threads", "gone: no longer exists; leave it out"])

    with pytest.raises(
        UsageError, match=rf"^{tmp_path}/config.yaml: change these keys .*:\ntrainer.threads: .*\ngone: "
    ):
        RunRecord.resume(tmp_path, CONFIG, step=0, complete=complete)


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}/new: no run to continue"):
        resume(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_may_use_another_server_but_not_none(tmp_path: Path) -> None:
    def with_server(url: str) -> str:
        return f"env: [{{id: a, url: {url}}}, {{id: b}}]"

    RunRecord.create(tmp_path, with_server("one"), force=False).close()
    resume(tmp_path, with_server("other")).close()
    with pytest.raises(UsageError, match=r"env\.0\.url: the run has other, the file has null"):
        resume(tmp_path, with_server("null"))


def test_a_resumed_run_may_be_asked_for_more_steps(tmp_path: Path) -> None:
    run_of(tmp_path, steps=1)
    longer = CONFIG.replace("steps: 10", "steps: 20")
    resume(tmp_path, longer, step=1).close()
    assert (tmp_path / "config.yaml").read_text() == longer


def test_a_timeline_is_a_compressed_file_that_a_resume_from_an_earlier_step_removes(tmp_path: Path) -> None:
    run_of(tmp_path, steps=2)
    record = resume(tmp_path, step=2)
    for step in (2, 10):
        record.timeline(step, [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "x"}}])
    record.close()
    content = orjson.loads(gzip.decompress((tmp_path / "timeline" / "step-10.json.gz").read_bytes()))
    assert [one["ph"] for one in content["traceEvents"]] == ["M"]
    resume(tmp_path, step=2).close()
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["step-2.json.gz"]


def test_tensorboard_sees_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,  # imported late, because the import takes seconds
    )

    from envkit.trainer_bridge.run_folder.tensorboard import EventFile

    run_of(tmp_path, steps=5, tensorboard=True)
    (old,) = (tmp_path / "tensorboard").iterdir()
    with old.open("ab") as file:
        file.write(b"\x20\x00\x00")  # a record cut short by a kill
    record = resume(tmp_path, step=3)
    record.add(EventFile(tmp_path / "tensorboard", first_step=4))
    record.step(4, {"success": 0.75})
    record.evaluation(4, {"eval_success": 0.5})
    record.close()

    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/success")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.3)),
        (4, 0.75),
    ]
    assert [event.step for event in found.Scalars("evaluation/eval_success")] == [1, 2, 3, 4]


def test_a_full_disk_ends_the_run_with_advice_and_keeps_the_written_rows(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", 64 << 10):
        folder = tmp_path / "disk" / "run"
        record = create(folder)
        step = 0
        with pytest.raises(UsageError, match=f"^{folder}/metrics.jsonl: {FULL}; free some space .*--resume$"):  # noqa: PT012
            while True:
                step += 1
                record.step(step, {"success": 0.1, "return": 1 / 3, "entropy_nats": 2 / 3})
        record.close()
        assert steps_in(folder / "metrics.jsonl") == list(range(1, step))
