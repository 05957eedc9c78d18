"""Tests that need something of the machine: skipped, with the reason, where it is missing.

This includes tests that fail because sandboxes refuse a limit that this machine cannot enforce (most need root). What
``ENVKIT_REQUIRE`` names (such as ``bwrap,docker``) must be there: its tests then fail instead of being skipped.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from pathlib import Path
from shlex import quote

import pytest
from hypothesis import HealthCheck, settings

from tests.programs.program import start_server

# Threads of torch, also in programs that tests start: small matrices are slower on many, and tests run in parallel.
# Set before the conftest.py of a folder imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_VENVS = Path(__file__).parents[1] / ".venv"
_WORKER = f"popen//python={quote(sys.executable)} -m tests.programs.worker"
_PEERS = _VENVS / "peers" / "bin" / "python"
_ALGORITHM_PEERS = _VENVS / "algorithm-peers" / "bin" / "python"


def _has_limits() -> str | None:
    from envkit.sandbox.bubblewrap.backend import LocalBackend, why_unavailable

    missing = [name for name, is_enforced in LocalBackend().capabilities().items() if not is_enforced]
    most_need_root = f"bubblewrap cannot enforce {', '.join(missing)} on this machine; most need root"
    return why_unavailable() or (most_need_root if missing else None)


def _has_detached() -> str | None:
    from envkit.sandbox.bubblewrap.arguments import why_refused
    from envkit.types import SandboxSpec

    return why_refused(SandboxSpec(detached=True))


def _has_model() -> str | None:
    from envkit.trainer_bridge.models.catalogue import CATALOGUE

    model = CATALOGUE["smollm2-135m"]
    return None if model.is_fetched else f"{model.folder} is missing; run: envkit model get {model.name}"


def _has_vllm() -> str | None:
    from envkit.trainer_bridge.engines.vllm.launch import find_python

    find_python()
    return None


_PROBES: Mapping[str, list[str] | Callable[[], str | None]] = {
    # A program that exists may still be forbidden to make a namespace, as in most containers.
    "bwrap": ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"],
    "docker": ["docker", "version", "--format", "{{.Server.Version}}"],
    "limits": _has_limits,
    "detached": _has_detached,
    "ray": [sys.executable, "-c", "import ray"],  # tests require that their process has not loaded it
    "slurm": ["sh", "-c", 'test -n "$SLURM_JOB_ID" && srun --ntasks=1 --overlap true'],
    "model": _has_model,
    "nginx": ["nginx", "-v"],
    "valgrind": ["sh", "-c", "gcc --version && make --version && valgrind --version"],
    "node": ["node", "-e", "if (!globalThis.fetch) throw Error('needs Node.js 18 or newer')"],
    "chromium": ["chromium", "--version"],
    "peers": [
        *("sh", "-c", '"$1" -c "import gym_sokoban.envs.sokoban_env" && "$2" -c "$3"'),
        *("peers", str(_PEERS), str(_ALGORITHM_PEERS)),
        "from importlib.metadata import version; version('verl')",  # the last to be installed; its import takes seconds
    ],
    "vllm": _has_vllm,
}
"""Commands that fail where a component is missing, and functions that return why; these cost no process."""
_PROBE_TIMEOUT_S = 20
_REFUSED = re.compile(
    "this backend cannot limit [a-z]+|untrusted programs are refused: this backend|detached sandboxes need root"
)
"""How bubblewrap sandboxes refuse what they cannot enforce."""


@pytest.fixture(scope="session")
def peers_python() -> Path:
    """The interpreter of the virtual environment with gym-sokoban, which ``make peers`` makes."""
    return _PEERS


@pytest.fixture(scope="session")
def algorithm_peers_python() -> Path:
    """The interpreter of the virtual environment with verl and TRL, which ``make peers`` makes."""
    return _ALGORITHM_PEERS


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the model smollm2-135m, for tests with the marker `model`."""
    from envkit.trainer_bridge.models.catalogue import CATALOGUE

    return CATALOGUE["smollm2-135m"].folder


def pytest_configure(config: pytest.Config) -> None:
    if unknown := _required() - set(_PROBES):
        raise pytest.UsageError(f"ENVKIT_REQUIRE: {', '.join(unknown)}: there are {', '.join(_PROBES)}")
    # How long an example takes says more about the machine's other users than about the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    gc.disable()  # while tests are collected: it would look at millions of objects that stay
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in whatever a shell starts with '&'; the programs that tests interrupt would be deaf to it too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start_server()
    if Path.cwd() == _VENVS.parent and "popen" in (config.getoption("tx", None) or []):
        config.option.tx = [one.replace("popen", _WORKER) for one in config.option.tx]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten the ids of long parameters. Some have megabytes, and each worker of pytest-xdist sends all ids."""
    return f"{val[:40]!a}... ({len(val)})" if isinstance(val, str | bytes) and len(val) > 200 else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let one worker run the tests of a module that share a fixture, so that it is made once, not in each worker."""
    module = item.getparent(pytest.Module)
    if isinstance(item, pytest.Function) and module is not None and item.get_closest_marker("xdist_group") is None:
        made = [one for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
        if any(one.scope == "module" or (one.scope, one.baseid) == ("session", module.nodeid) for one in made):
            item.add_marker(pytest.mark.xdist_group(module.nodeid))


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with slow tests, so that no worker is left with one at the end; groups come first anyway."""
    names = ("slow", "xdist_group")
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in names] != [False, True])


def pytest_collection_finish() -> None:
    """Let the garbage collector look only at what the tests themselves make."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _PROBES:
        if item.get_closest_marker(name) is not None and (cause := _why_missing(name)):
            if name in _required():
                pytest.fail(f"{name} is required and does not work: {cause}", pytrace=False)
            pytest.skip(f"{name} does not work here: {cause}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that failed because this machine cannot enforce all limits, unless ENVKIT_REQUIRE has ``limits``."""
    report = yield
    # Only what was raised is searched, not the source code that the report shows.
    raised = "\n".join(_messages(call.excinfo.value)) if report.failed and call.excinfo is not None else ""
    refused = None if "limits" in _required() else _REFUSED.search(raised)
    if refused is not None and (cause := _why_missing("limits")) is not None:
        report.outcome = "skipped"
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {refused[0]} ({cause})")
    return report


def _messages(error: BaseException) -> Iterator[str]:
    """Yield the messages of an error, of its causes, which may be a circle, and of the errors in a group."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield str(one)
            left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [] if one.__cause__ is None else [one.__cause__]


def _required() -> set[str]:
    names = os.environ.get("ENVKIT_REQUIRE", "").split(",")
    return {name.strip() for name in names} - {""}


@cache
def _why_missing(name: str) -> str | None:
    """Return why the component does not work, in one line; None when it does."""
    probe = _PROBES[name]
    if not isinstance(probe, list):
        try:
            return probe()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    try:
        done = subprocess.run(
            probe, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return f"there is no program {probe[0]}"
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


FRAIL = """
import gymnasium
import envkit
from envkit.spaces import Utf8Text

class Frail(gymnasium.Env):
    metadata = {"render_modes": ["html"]}
    observation_space = action_space = Utf8Text(100)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return "Say a word.", {}

    def step(self, action):
        if action == "crash":
            raise KeyError("no such word")
        return f"You said {action!r}.\\x1b]0;title\\x07", 0.25, False, False, {}

    def render(self):
        return "<p>page"

def bring():
    envkit.register("Frail-v0", "frail:Frail")
"""


@pytest.fixture
def frail(tmp_path: Path) -> Path:
    """A folder with an installed package that brings Frail-v0, which lists no moves and can be broken."""
    metadata = tmp_path / "frail-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "frail.py").write_text(FRAIL)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: frail\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[envkit.envs]\nfrail = frail:bring\n")
    return tmp_path
