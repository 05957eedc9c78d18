"""Tasks of Harbor are read with all that envkit supports; what it does not support is a note or an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from envkit.environments.terminal.formats import read_task, write_task
from envkit.environments.terminal.tasks import Artifact, Collect, Healthcheck
from envkit.errors import ConfigError, UsageError
from tests.environments.terminal.formats.folders import harbor, portable, write_files

KEYS = {
    "": {"schema_version", "task", "metadata", "verifier", "agent", "environment", "solution", "source", "artifacts"},
    "task": {"name", "version", "description", "authors", "keywords"},
    "agent": {"timeout_sec", "user", "network_mode", "allowed_hosts"},
    "verifier": {
        "timeout_sec",
        "env",
        "user",
        "network_mode",
        "allowed_hosts",
        "environment_mode",
        "environment",
        "collect",
    },
    "environment": {"build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types"}
    | {"tpu", "env", "workdir", "skills_dir", "network_mode", "allowed_hosts", "healthcheck", "mcp_servers"},
}
"""The keys of schema 1.4, by table."""


def test_a_task_of_schema_1_4_keeps_what_it_says(tmp_path: Path) -> None:
    toml = """
        schema_version = "1.4"
        artifacts = ["/app/out", {source = "/srv", destination = "srv", exclude = ["*.log"]}]
        [task]
        name = "org/one"
        [metadata]
        difficulty = "hard"
        category = "files"
        something = [1, 2]
        [agent]
        timeout_sec = 100
        [verifier]
        timeout_sec = 20.5
        environment_mode = "separate"
        env = {TOKEN = "abc"}
        [[verifier.collect]]
        command = "dump"
        [environment]
        cpus = 2
        memory_mb = 2048
        storage_mb = 4096
        network_mode = "allowlist"
        allowed_hosts = ["pypi.org"]
        workdir = "/app"
        env = {PORT = "${ENVKIT_TEST_PORT:-80:80}", MODE = "x"}
        [environment.healthcheck]
        command = "ready"
        retries = 5
        start_period_sec = 2
        [solution]
        env = {FAST = "1"}
    """
    task = read_task(harbor(tmp_path, toml, {"cheats/early.sh": "true\n"}))

    assert (task.name, task.difficulty, task.category, task.profile) == ("org/one", "hard", "files", "system")
    assert (task.cpus, task.memory_mib, task.disk_mib, task.network) == (2, 2048, 4096, ("pypi.org",))
    assert (task.workdir, task.env, task.solution_env) == ("/app", {"PORT": "80:80", "MODE": "x"}, {"FAST": "1"})
    assert task.healthcheck == Healthcheck(command="ready", retries=5, start_period_s=2)
    assert task.artifacts == (
        Artifact(source="/logs/artifacts"),
        Artifact(source="/app/out"),
        Artifact(source="/srv", exclude=("*.log",)),
    )
    assert task.cheats == {"early": tmp_path / "cheats" / "early.sh"}
    assert (task.instruction, task.timeout_s, task.solution) == ("Do it.\n", 100, tmp_path / "solution")
    assert (task.verifier.tests, task.verifier.timeout_s, task.verifier.env) == (
        tmp_path / "tests",
        20.5,
        {"TOKEN": "abc"},
    )
    assert task.verifier.is_separate
    assert task.verifier.collect == (Collect(command="dump"),)
    assert task.notes == ()


def test_an_empty_file_has_the_defaults_of_harbor(tmp_path: Path) -> None:
    task = read_task(harbor(tmp_path / "name"))

    assert (task.name, task.network, task.workdir, task.cpus) == ("name", "open", "", None)
    assert not task.is_portable
    assert not task.verifier.is_separate
    assert task.verifier.timeout_s == 600
    assert task.artifacts == ()


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        ('ENTRYPOINT ["sh", "/start.sh"]\nCMD ["x"]\n', ["ENTRYPOINT of the image: is not run"]),
        ("USER joe:staff\n", ["USER of the image: joe:staff: programs run as root"]),
        ("ENTRYPOINT x\nUSER joe\nUSER root\nENTRYPOINT []\n", []),
        ("USER joe\nFROM other\n", []),
    ],
)
def test_settings_of_the_image_that_are_not_supported_are_notes(lines: str, notes: list[str], tmp_path: Path) -> None:
    files = {"environment/Dockerfile": f"FROM debian\n{lines}"}
    assert list(read_task(harbor(tmp_path, files=files)).notes) == notes


def test_test_scripts_with_other_line_ends_are_a_note(tmp_path: Path) -> None:
    (note,) = read_task(harbor(tmp_path, files={"tests/test.sh": "#!/bin/bash\r\ntrue\r\n"})).notes
    assert note == "verifier: tests/test.sh has CR LF line ends, with which shells fail"


def test_older_keys_mean_the_same(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    task = read_task(harbor(tmp_path, toml))

    assert (task.memory_mib, task.disk_mib, task.network) == (2048, 512, "none")


def test_steps_have_their_own_tests_and_inherit_the_rest(tmp_path: Path) -> None:
    toml = """
        multi_step_reward_strategy = "final"
        [agent]
        timeout_sec = 50
        [verifier]
        environment_mode = "separate"
        env = {A = "1", B = "1"}
        [[steps]]
        name = "first"
        min_reward = 0.5
        artifacts = ["/data"]
        [steps.verifier]
        env = {B = "2"}
        environment_mode = "shared"
        [[steps]]
        name = "second"
        min_reward = {reward = 1.0}
        [steps.agent]
        timeout_sec = 5
        [steps.healthcheck]
        command = "up"
    """
    files = {f"steps/{name}/instruction.md": f"{name}\n" for name in ("first", "second")}
    own = {"steps/first/tests/test.sh": "", "steps/first/workdir/setup.sh": "", "steps/second/solution/solve.sh": ""}
    task = read_task(harbor(tmp_path, toml, {**files, **own}))
    first, (second,) = task, task.later

    assert (first.name, second.name) == (tmp_path.name, f"{tmp_path.name} (second)")
    assert (task.reward, first.instruction, second.instruction) == ("final", "first\n", "second\n")
    assert first.verifier.tests == tmp_path / "steps/first/tests"
    assert second.verifier.tests == tmp_path / "tests"
    assert (first.verifier.env, first.verifier.is_separate) == ({"A": "1", "B": "2"}, False)
    assert (second.verifier.env, second.verifier.is_separate) == ({"A": "1", "B": "1"}, True)
    assert (first.timeout_s, second.timeout_s, first.min_reward, second.min_reward) == (50, 5, 0.5, 1)
    assert (first.step_setup, second.step_setup) == (tmp_path / "steps/first/workdir/setup.sh", None)
    assert (first.solution, second.solution) == (None, tmp_path / "steps/second/solution")
    assert (first.artifacts, second.step_healthcheck) == ((Artifact(source="/data"),), Healthcheck(command="up"))


def test_marks_at_the_top_of_an_instruction_are_not_shown(tmp_path: Path) -> None:
    text = "<!-- data CANARY GUID 1 -->\n# canary 2\n\n# Title\ncanary\n"
    assert read_task(harbor(tmp_path, "", {"instruction.md": text})).instruction == "# Title\ncanary\n"


@pytest.mark.parametrize(
    ("toml", "note"),
    [
        ("[environment]\ngpus = 1\n", "environment.gpus: "),
        ('[[environment.mcp_servers]]\nname = "a"\n', "environment.mcp_servers: "),
        ('[verifier]\nuser = "me"\n', "verifier.user: me"),
        (
            '[verifier]\nnetwork_mode = "public"\n[environment]\nnetwork_mode = "no-network"\n',
            "verifier.network_mode: ",
        ),
    ],
)
def test_what_envkit_ignores_is_a_note(toml: str, note: str, tmp_path: Path) -> None:
    (found,) = read_task(harbor(tmp_path, toml)).notes
    assert found.startswith(note)


COMPOSE = "services:\n  main:\n    build: .\n  db:\n    image: postgres\n"


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[environment", "not valid TOML"),
        ('[environment]\ncpus = "two"\n', "environment.cpus: Expected `float | null`, got `str`"),
        ('[environment]\nmemory = "2 apples"\n', "environment.memory: must be a size like 2G or 512M"),
        ('[environment]\nos = "windows"\n', "environment.os: envkit has only Linux sandboxes"),
        (
            '[environment.env]\nA = "${PATH}"\n',
            "environment.env.A: tasks cannot read PATH of this machine; write its value here",
        ),
        ('[environment]\ndocker_image = "/"\n', "docker_image: must be the name of a Docker image, got '/'"),
        ('[verifier.environment]\ndocker_image = "/"\n', "verifier.environment.docker_image: must be the name"),
        ('[environment.healthcheck]\ncommand = "x"\nstart_period_sec = inf\n', "start_period_sec: Expected `float` <="),
        ("x = " + "[" * 50_000, "not valid TOML: "),
        (".".join("a" * 600) + " = 1\n", "a line has 599 dots"),
        ("#" * 300_000, "must have at most 256 KiB"),
        ('schema_version = "2.0"\n', "schema_version: version '2.0' is not supported"),
        ('artifacts = ["out"]\n', "artifacts: must be an absolute path without .., got 'out'"),
        ('artifacts = [{source = "/x", service = "db"}]\n', "artifacts: envkit plays tasks with one container"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n', "verifier.environment: needs"),
        ('[[steps]]\nname = "../x"\n', "steps.name: must be the name of a folder in steps, got '../x'"),
        ('[metadata.envkit]\nportable = true\nprofile = "system"\n', "metadata.envkit.portable: needs"),
        (
            '[metadata.envkit]\nportable = true\nsetup = "setup.sh"\n',
            "metadata.envkit.setup: environment/",
        ),
    ],
)
def test_an_error_names_the_file_and_the_key(toml: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_task(harbor(tmp_path, toml))

    assert str(error.value).startswith(str(tmp_path))
    assert problem in str(error.value)


def test_a_task_with_several_services_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services: envkit plays tasks with one container; this one has main, db"):
        read_task(harbor(tmp_path, "", {"environment/docker-compose.yaml": COMPOSE}))


@pytest.mark.parametrize("missing", ["tests/test.sh", "environment/Dockerfile", "instruction.md"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    harbor(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=re.escape(missing)):
        read_task(tmp_path)


def test_material_named_like_a_file_of_docker_compose_is_material(tmp_path: Path) -> None:
    files = {"environment/docker-compose.yml": COMPOSE, "docker-compose.yaml": COMPOSE, "tests/compose.yaml": "["}
    assert read_task(harbor(tmp_path, "", files)).notes == ()


def test_variables_of_this_process_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVKIT_TEST_TOKEN", "secret")
    folder = harbor(tmp_path, '[environment.env]\nA = "${ENVKIT_TEST_TOKEN:-none}"\n')
    assert read_task(folder).env == {"A": "none"}


@pytest.mark.parametrize(
    "path",
    ["task.toml", "environment", "tests/more.sh", "steps/one"],
)
def test_a_link_out_of_the_folder_is_not_followed(path: str, tmp_path: Path) -> None:
    folder, outside = harbor(tmp_path / "task"), harbor(tmp_path / "outside")
    place = folder / path
    if place.exists():
        place.rename(tmp_path / "moved")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside / (path if (outside / path).exists() else "tests"))

    with pytest.raises(ConfigError, match=re.escape(f"{place}: must not be a link out of the folder")):
        read_task(folder)


def test_links_in_the_material_and_within_the_folder_are_allowed(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task")
    (folder / "environment/current").symlink_to("/app/releases/1")
    (folder / "tests/data").symlink_to("/srv/data")
    (folder / "instruction.md").rename(folder / "README.md")
    (folder / "instruction.md").symlink_to("README.md")
    assert read_task(folder).instruction == "Do it.\n"


@pytest.mark.parametrize("path", ["instruction.md", "tests/pipe"])
def test_a_named_pipe_is_refused_and_not_read(path: str, tmp_path: Path) -> None:
    folder = harbor(tmp_path)
    (folder / path).unlink(missing_ok=True)
    os.mkfifo(folder / path)
    with pytest.raises(ConfigError, match="must be a regular file or a folder"):
        read_task(folder)


def test_sparse_files_are_not_read(tmp_path: Path) -> None:
    with (harbor(tmp_path) / "tests/large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="its files have 1048576 MiB; the limit is 2048 MiB"):
        read_task(tmp_path)


def test_the_recursion_of_yaml_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"docker-compose\.yaml: maximum recursion depth"):
        read_task(harbor(tmp_path, files={"environment/docker-compose.yaml": "[" * 1_000}))


def test_a_written_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    task = read_task(portable(tmp_path / "task"))

    assert (task.name, task.difficulty, task.category, task.profile) == ("envkit/sum", "easy", "text", "strict")
    assert (task.is_portable, task.setup, task.programs, task.packages) == (True, "setup.sh", ("awk",), ("gawk",))
    assert (task.workdir, task.network, task.artifacts) == ("/workspace", "none", ())
    assert task.healthcheck is not None
    assert task.healthcheck.retries == 1
    assert task.instruction == "Add the numbers in numbers.txt and write the sum to sum.txt.\n"
    assert (task.verifier.is_separate, task.verifier.timeout_s) == (True, 30)
    assert (task.verifier.tests / "data/one.bin").read_bytes() == b"\0\xff"
    assert list(task.cheats) == ["empty"]
    assert task.notes == ()


def test_a_written_task_has_what_harbor_needs(tmp_path: Path) -> None:
    """It has only keys of the schema, and all files."""
    folder = portable(tmp_path / "task")
    content = tomllib.loads((folder / "task.toml").read_text())
    files = ["instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/harness.py", "solution/solve.sh"]

    assert content["schema_version"] == "1.4"
    assert content["task"]["description"] == 'Add "numbers"\nof a file \\ and more \x7f é'
    for name, known in KEYS.items():
        assert set(content[name] if name else content) <= known, name
    assert [name for name in files if not (folder / name).is_file()] == []
    assert [name for name in ("tests/test.sh", "environment/bin/add") if not os.access(folder / name, os.X_OK)] == []
    assert not os.access(folder / "environment/numbers.txt", os.X_OK)


def test_services_run_as_they_were_written(tmp_path: Path) -> None:
    script = 'word=it; echo \'"quoted"\' "$word\'s"; (sleep 0 &) # done\n'
    write_task(tmp_path / "a", name="a", instruction="", files={}, solution="", check={"check.py": ""}, services=script)
    healthcheck = read_task(tmp_path / "a").healthcheck

    assert healthcheck is not None
    # In place of su, which root runs and which changes the user
    command = healthcheck.command.replace("exec su agent -s /bin/sh -c", "exec sh -c")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == '"quoted" it\'s\n'


def test_a_task_of_envkit_is_verified_in_a_sandbox_of_its_own_unless_it_says_otherwise(tmp_path: Path) -> None:
    own = "[metadata.envkit]\nprograms = []\n"
    silent = read_task(harbor(tmp_path / "a", own))
    shared = read_task(harbor(tmp_path / "b", f'{own}[verifier]\nenvironment_mode = "shared"\n'))

    assert [task.verifier.is_separate for task in (silent, shared)] == [True, False]
    assert silent.artifacts == ()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "Dockerfile", "setup.sh"])
def test_a_file_outside_the_environment_or_with_the_name_of_a_made_one_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_task(tmp_path / "a", name="a", instruction="", files={path: ""}, solution="", check={"check.py": ""})


def test_a_task_is_not_written_over_other_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        portable(write_files(tmp_path, {"mine.txt": ""}))


AT_ONCE = """
import sys, threading
from pathlib import Path
from envkit.environments.terminal.formats import read_task

def read():
    barrier.wait()
    read_task(Path(sys.argv[1]))
    done.append(1)

sys.setswitchinterval(1e-6)
barrier, done = threading.Barrier(8), []
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done))
"""


@pytest.mark.parametrize("attempt", range(2))  # without preparation, more than half of the processes crash
def test_the_first_tasks_of_a_process_can_be_read_by_several_threads_at_once(attempt: int, tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", 'schema_version = "1.4"')
    command = [sys.executable, "-c", AT_ONCE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
