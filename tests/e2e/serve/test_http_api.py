"""The page about the HTTP API: its examples work in the order of the page, and so does the JavaScript client."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serve.gateway import Gateway, gateway

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("http-api")]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```curl\n(.*?)\n```", PAGE)
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("serve"), has_tokens=False) as running:
        yield running


def test_every_example_of_the_page_succeeds(server: Gateway, tmp_path: Path) -> None:
    assert len(EXAMPLES) > 25
    for example in EXAMPLES:
        command = example.replace(URL, server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (example, done.stdout, done.stderr)
        assert '"error":' not in done.stdout, (example, done.stdout)


@pytest.mark.node
def test_the_javascript_client_plays_an_episode(server: Gateway) -> None:
    for env_id in ("FrozenLake-v0", "Sokoban-v0"):
        words = ["node", str(ROOT / "examples" / "play.mjs"), server.url, env_id, "7"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert re.search(r"reward -?[\d.]+ after \d+ steps\n$", done.stdout)
    words[3] = "Nothing-v0"
    failed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert "there is no environment 'Nothing-v0'" in failed.stderr or "Nothing-v0" in failed.stderr
    assert len(Path(words[1]).read_text().splitlines()) <= 60
