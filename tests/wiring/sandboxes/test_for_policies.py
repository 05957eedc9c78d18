"""Sandboxes for programs of a policy where bubblewrap lacks limits, as it does without root."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import envkit
from envkit.config.serving import ServeConfig
from envkit.errors import SandboxRefusedError
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.types import SandboxSpec
from envkit.wiring.gateway.gateway import open_fleet
from envkit.wiring.sandboxes import backends
from envkit.wiring.sandboxes.backends import choose_for_policy

pytestmark = [pytest.mark.bwrap, pytest.mark.anyio]
LIMITS = ["memory", "pids", "cpu", "uid"]


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an ordinary user without a control group and without Docker has."""
    all_of = LocalBackend.capabilities

    def capabilities(self: LocalBackend) -> Mapping[str, bool]:
        return {**all_of(self), **dict.fromkeys(LIMITS, False)}

    async def no_daemon(image: str | None = None) -> str | None:
        return "no Docker daemon answers"

    backends._warn_once.cache_clear()
    monkeypatch.setattr(LocalBackend, "capabilities", capabilities)
    monkeypatch.setattr(docker, "why_unavailable", no_daemon)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("env_id", ["Code-v0", "Terminal-v0"])
def test_an_ordinary_user_plays_with_one_warning_and_the_result_names_the_missing_limits(
    env_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("e", "again"):
        envkit.evaluate(env_id, "oracle", episodes=1, output=tmp_path / folder)
    assert caplog.text.count("does not limit memory, pids, cpu, uid here") == 1
    assert json.loads((tmp_path / "e" / "evaluation.json").read_bytes())["settings"]["sandbox"]["lacking"] == LIMITS


@pytest.mark.usefixtures("ordinary")
async def test_only_the_backend_for_policies_starts_an_untrusted_program_without_limits() -> None:
    spec = SandboxSpec(untrusted=True, memory_mib=512, cpus=1)
    async with LocalBackend() as strict:
        with pytest.raises(SandboxRefusedError, match="does not enforce memory, pids, cpu, uid"):
            await strict.start(spec)
    async with (await choose_for_policy("local")).backend as lenient:
        sandbox = await lenient.start(spec)
        assert (await sandbox.exec(["echo", "here"])).stdout == "here\n"


@pytest.mark.usefixtures("ordinary")
async def test_docker_is_chosen_before_a_bubblewrap_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def works(image: str | None = None) -> str | None:
        return None

    monkeypatch.setattr(docker, "why_unavailable", works)
    assert (await choose_for_policy()).name == "docker"
    assert (await choose_for_policy("local")).lacking == tuple(LIMITS)


@pytest.mark.usefixtures("ordinary")
async def test_a_server_says_at_its_start_that_it_refuses_these_programs(tmp_path: Path) -> None:
    lines: list[str] = []
    content = {
        "backend": "local",
        "state": str(tmp_path),
        "listen": {"port": 0},
        "envs": {"capacity": 1, "sandboxes": 1},
    }
    async with open_fleet(ServeConfig.model_validate(content), lines.append):
        assert any("untrusted programs are refused" in line and "cpu, memory, pids, uid;" in line for line in lines)
