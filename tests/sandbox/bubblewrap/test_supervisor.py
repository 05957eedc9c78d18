"""The host side of one bubblewrap sandbox."""

from __future__ import annotations

import os
from pathlib import Path

from envkit.sandbox.bubblewrap.supervisor import Supervisor
from envkit.sandbox.host import cgroups


def test_a_second_release_does_not_close_a_descriptor_that_reuses_the_number(tmp_path: Path) -> None:
    info, writer = os.pipe()
    supervisor = Supervisor(None, cgroups.Cgroup(cgroups.find(tmp_path), "g"), info=info)
    supervisor.release()
    os.dup2(writer, info)
    supervisor.release()
    os.close(info)  # raises OSError if it is closed already
    os.close(writer)
