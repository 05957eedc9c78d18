"""Mount options of a running sandbox, changed from the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.sandbox.host.remount import reconfigure


@pytest.mark.parametrize("options", [{"nr_inodes": "16384"}, {"no-such-option": ""}])
def test_a_folder_that_is_no_mount_is_an_error(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(OSError, match=r"Invalid argument|Operation not permitted"):
        reconfigure(tmp_path, options)
