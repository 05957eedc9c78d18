"""What we know of a Docker daemon by what it answers."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest

from envkit import clock
from envkit.sandbox.daemon import Daemon, DaemonError

VOLUME = "4f8b03f272d80c00b6b9591a83b88f83864141279a3c6ea59be03f1f2a9f6374"


class Ending:
    """A daemon that makes volumes, but no longer writes down whose they are."""

    def __init__(self) -> None:
        self.volumes = {VOLUME, "somebody-elses"}

    def create_container_from_config(self, options: object) -> None:
        errors = importlib.import_module("docker.errors")
        raise errors.APIError("500 Server Error", explanation=f"create {VOLUME}: database not open")

    def remove_volume(self, name: str) -> None:
        self.volumes.remove(name)


def test_volumes_that_an_ending_daemon_made_without_labels_are_removed_once() -> None:
    async def main() -> None:
        api = Ending()
        daemon = Daemon(api, api, "/run/none.sock", {})
        for _ in range(2):
            with pytest.raises(DaemonError, match="database not open"):
                await daemon.create({}, nullcontext())
        for _ in range(2):
            await daemon.remove_orphans()
        assert api.volumes == {"somebody-elses"}

    clock.run(main)
