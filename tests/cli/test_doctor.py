"""``envkit doctor`` and ``envkit image``, as a user types them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import envkit


@pytest.mark.bwrap
def test_the_doctor_reports_limits_and_times_of_each_kind_of_sandbox_as_json() -> None:
    code, output, errors = envkit("doctor", "--json")
    found = json.loads(output)
    local, docker, process = found["backends"]
    assert (code, errors, found["works"]) == (0, "", True)
    assert [backend["name"] for backend in (local, docker, process)] == ["local", "docker", "process"]
    assert local["problem"] is None
    assert local["capabilities"]["isolation"]
    assert not any(process["capabilities"].values())
    assert 0 < local["exec_ms"] < local["start_ms"]
    assert bool(local["shared"]) is not found["machine"]["own uids"].startswith("yes")
    assert found["machine"]["bubblewrap"].startswith("bubblewrap ")
    assert {"docker daemon", "user namespaces", "seccomp filters", "control groups", "gpu"} < set(found["machine"])


@pytest.mark.bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give sandboxes uids of their own")
def test_the_doctor_names_what_sandboxes_share_where_they_have_no_uids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "bwrap").symlink_to(str(shutil.which("bwrap")))
    _, output, _ = envkit("doctor", PATH=str(tmp_path), DOCKER_HOST=f"unix://{tmp_path}/none", COLUMNS="200")
    names = "inotify instances, queued signals and timers, pipe memory, POSIX message queues"
    assert f"local: sandboxes of this kind compete for: {names}\n" in output
    assert "no user namespace for each sandbox: [Errno 2] No such file or directory: 'setpriv'" in output


def test_the_doctor_prints_the_command_that_installs_what_is_missing(tmp_path: Path) -> None:
    code, output, _ = envkit("doctor", PATH=str(tmp_path), DOCKER_HOST=f"unix://{tmp_path}/none", COLUMNS="200")
    assert code == 0  # plain processes are left
    assert "local: bubblewrap is not installed (apt install bubblewrap)" in output
    assert output.count("apt install bubblewrap") == 1
    assert output.count("docker: apt install docker.io") == 1
