"""Wrong input on the command line is reported in one line, with an exit code and without a traceback."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import chdir, closing
from pathlib import Path

import pytest

from envkit import cli
from tests.docs.installed import bin_folder

NO_SERVER = "http://127.0.0.1:1"

# Command line, exit code, and a part of the message. PORT is a port that is in use.
WRONG = [
    ("evl", 2, "No such command 'evl'. Did you mean 'eval'?"),
    ("list Sokoban", 2, "no environment is called 'Sokoban'; did you mean 'Sokoban-v0'?"),
    ("--verbose", 2, "No such option: --verbose"),
    ("doctor --jsn", 2, "No such option: --jsn (Possible options: --json)"),
    # Files.
    ("train", 2, "Missing argument 'FILE'"),
    ("train nosuch.yaml", 2, "nosuch.yaml: No such file or directory"),
    ("train folder", 2, "folder: name a training file, not a folder"),
    ("train --resume run", 2, "not a folder; that of its run is run/config.yaml (with --output run)"),
    ("train broken.yaml", 2, "broken.yaml: line 2, column 1: not YAML: the '{' of line 1, column 6 has no '}'"),
    ("train empty.yaml", 2, "empty.yaml: must hold keys and values, such as"),
    ("train binary.yaml", 2, "binary.yaml: not UTF-8 text (byte 1)"),
    ("train good.yaml --resume --force", 2, "--resume continues the run and --force replaces it"),
    ("train good.yaml --resume --output nowhere", 2, "no checkpoint to continue from; start without --resume"),
    ("train good.yaml --output file", 2, "a file has the name of a folder; choose another folder"),
    ("train good.yaml --output run", 2, "run: config.yaml exists but belongs to no run; choose another folder"),
    # Keys and values of a training file.
    ("train good.yaml --set trainer.step=3", 2, "trainer.step: no such key; did you mean 'steps'?"),
    ("train good.yaml --set trainer.steps", 2, "trainer.steps: must have the form section.key=value"),
    ("check good.yaml --set trainer.steps=many", 2, "trainer.steps: must be a whole number, got 'many'"),
    ("check good.yaml --set sandbox.count=0", 2, "sandbox.count: must be at least 1, got 0"),
    ("check good.yaml --set tracking.to=tensorboard", 2, "tracking.to: must be a list, got 'tensorboard'"),
    ("check good.yaml --set 'env.options={size: '", 2, "env.options: '{size: ' is not YAML"),
    ("check good.yaml --set env.id=FrozenLak-v0", 2, "did you mean 'FrozenLake-v0'?"),
    ("check good.yaml --set env.options.sise=3", 2, "env.options.sise: no such option; did you mean 'size'?"),
    ("check good.yaml --set engine.device=tpu", 2, "engine.device: must be one of auto, cpu, cuda, got 'tpu'"),
    ("check good.yaml --set engine.model=./nowhere", 2, "no model at ./nowhere; name a folder with"),
    ("check good.yaml --set engine.model=a/b/c", 2, "a/b/c is neither a folder here nor a model name of the hub"),
    ("check good.yaml --set engine.hidden_size=24", 2, "engine.hidden_size: must be a multiple of 16, got 24"),
    ("check good.yaml --set trainer.lr=1", 2, "trainer.lr: no such key; did you mean 'trainer.learning_rate'?"),
    (
        "check good.yaml --set sandbox.kind=podman",
        2,
        "no sandbox backend is called 'podman'; there are: auto, docker,",
    ),
    ("check good.yaml --set rollout.group_size=1", 2, "rollout.group_size: group_normalised compares the episodes"),
    ("check good.yaml --set imitation.kind=none", 2, "imitation.kind: a new tiny policy needs demonstrations"),
    ("check-template nowhere", 2, "cannot load nowhere: no such folder or cached model"),
    # Playing and measuring.
    ("eval FrozenLake-v0", 2, "policy: missing; name one, such as random, expert or model:smollm2-135m ("),
    ("eval FrozenLake-v0 --policy smollm2-135m", 2, "there is no 'smollm2-135m'; did you mean 'model:smollm2-135m'?"),
    ("eval Backgammon-v0 --policy random", 2, "no environment is called 'Backgammon-v0'; there are: "),
    ("eval FrozenLake-v0 --policy randm", 2, "policy: there is no 'randm'; did you mean 'random'?"),
    ("eval FrozenLake-v0 --policy checkpoint:folder", 2, "folder: neither a run's folder nor a checkpoint"),
    ("eval FrozenLake-v0 --policy agent:", 2, "policy: agent: lacks NAME after the colon; write agent:NAME"),
    ("eval FrozenLake-v0 --policy openai:qwen", 2, "lacks the model or the URL of a server; write openai:MODEL@URL"),
    ("eval FrozenLake-v0 --policy openai:qwen@http://a:b@c", 2, "the URL of qwen holds a password; set OPENAI_"),
    (f"eval FrozenLake-v0 --policy openai:qwen@{NO_SERVER}", 1, f"no server answers at {NO_SERVER}/v1"),
    ("eval FrozenLake-v0 --policy random --episodes 0", 2, "evaluation.episodes: must be at least 1"),
    ("eval FrozenLake-v0 --policy random --option slip=2", 2, "slip: must be a number from 0 to 1, got 2"),
    ("eval FrozenLake-v0 --policy random --option slip", 2, "--option slip: must have the form key=value"),
    ("eval FrozenLake-v0 --policy random --split test", 2, "FrozenLake-v0 has no split 'test'; there are: "),
    ("eval FrozenLake-v0 --policy random --url nonsense", 2, "'nonsense' is not a server address, such as"),
    (f"eval FrozenLake-v0 --policy random --url {NO_SERVER}", 1, f"{NO_SERVER} does not answer"),
    ("play FrozenLake-v0 --seed -1", 2, "Invalid value for '--seed'"),
    ("play FrozenLake-v0 --option map=9x9", 2, "map: '9x9' is not a known value; there are: 4x4, 8x8"),
    ("play FrozenLake-v0 --browser", 2, "--browser: FrozenLake-v0 has no render mode 'html'; leave --browser out"),
    (f"play FrozenLake-v0 --browser --url {NO_SERVER}", 2, "--browser: a server has no pages; leave out --browser"),
    ("play FrozenLake-v0 --option slop=1", 2, "slop: no such option; did you mean 'slip'?"),
    # Serving.
    ("serve --backend podman", 2, "backend: must be one of auto, local, docker, process, nodes, none, got 'podman'"),
    ("serve --port 70000", 2, "Invalid value for '--port'"),
    ("serve --backend none --state state --port PORT", 2, "is in use; choose another one, or 0 for any free port"),
    ("serve --config fleet.yaml", 2, "listen.port: must be at most 65535, got 70000"),
    ("serve --config webhook.yaml", 2, "alerts.webhook: must be an http or https URL, such as https://"),
    ("serve --set listen.prot=1", 2, "listen.prot: no such key; did you mean 'port'?"),
    ("serve --host 0.0.0.0 --port 0 --state state", 2, "there are no tokens; create one with"),
    ("serve --host no.such.host.invalid --port 0 --state state", 2, "no.such.host.invalid"),
    ("serve --socket /nosuch/x.sock --state state", 2, "cannot create a socket at /nosuch/x.sock"),
    ("serve --state file --port 0", 2, "choose a folder that can be written (--state)"),
    ("token create", 2, "Missing option '--tenant'"),
    ("token create --tenant 'a b' --state state", 2, "tenant: must be 1 to 32"),
    ("token create --tenant a --scopes plai --state state", 2, "scopes: unknown scope 'plai'; did you mean 'play'?"),
    (
        "token create --tenant a --ttl soon",
        2,
        "--ttl: must be a whole number and s, m, h or d, such as 30d; got 'soon'",
    ),
    ("token create --tenant a --ttl 0d --state state", 2, "ttl: must be above 0 s"),
    ("token revoke nosuch --state state", 2, "there is no token 'nosuch' to revoke"),
    ("token ls --state file", 2, "choose a folder that can be written (--state)"),
    # Models, sandboxes and images.
    ("model get smollm", 2, "no model is called 'smollm'; did you mean 'smollm2-135m'?"),
    ("sandbox run --backend podman -- true", 2, "Invalid value for '--backend'"),
    ("sandbox run --memory-mib 0 -- true", 2, "Invalid value for '--memory-mib'"),
    ("sandbox run --env A -- true", 2, "--env: must be NAME=VALUE, got 'A'"),
    ("sandbox run --upload nosuch -- true", 2, "--upload: no such file or folder: nosuch"),
    ("sandbox run --detach --tty -- true", 2, "--detach does not wait for the program; leave out"),
    ("sandbox run --backend process --runtime runsc -- true", 2, "does not support runtime=runsc"),
    (f"sandbox run --url {NO_SERVER} -- true", 1, f"{NO_SERVER} does not answer"),
    (f"sandbox run --url {NO_SERVER} --backend docker -- true", 2, "--backend: a server chooses its own"),
    ("sandbox exec nosuch -- true", 1, "no sandbox 'nosuch' on this machine: ids begin with bwrap- or docker-"),
    (f"sandbox exec nosuch --url {NO_SERVER} -- true", 2, "--url: put options before the id"),
    ("sandbox logs nosuch", 1, "no sandbox 'nosuch'"),
    ("sandbox ls --token-file token", 2, "--token-file and --ca need --url"),
    (f"sandbox ls --url {NO_SERVER} --token-file nosuch", 2, "cannot read a token from nosuch"),
    ("sandbox ls --url https://127.0.0.1:1 --ca file", 2, "cannot read certificates from file"),
    ("sandbox snapshot ls", 2, "Missing option '--url'"),
    ("image build", 2, "Missing argument 'NAME'"),
    ("image build gams", 2, "there is no image 'gams'; did you mean 'games'?"),
]

AS_PROCESSES = ["serve --backend none --state state --port PORT"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder, with files for wrong inputs."""
    made = tmp_path_factory.mktemp("wrong")
    (made / "good.yaml").write_text("env: {id: FrozenLake-v0}\n")
    (made / "broken.yaml").write_text("env: {id: FrozenLake-v0\n")
    (made / "empty.yaml").write_text("")
    (made / "binary.yaml").write_bytes(b"\xff\xfe")
    (made / "fleet.yaml").write_text("listen: {port: 70000}\n")
    (made / "webhook.yaml").write_text("alerts: {webhook: nowhere}\n")
    (made / "file").write_text("neither a folder nor a certificate")
    (made / "folder").mkdir()
    (made / "run").mkdir()
    (made / "run" / "config.yaml").write_text("env: {id: FrozenLake-v0}\n")
    with chdir(made):
        yield made


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Return a port that is in use."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


def line_of(errors: str) -> str:
    """Return the line of the message; errors about the command line follow two lines of usage."""
    assert "Traceback" not in errors
    assert not set("╭│╰") & set(errors)
    (line,) = [line for line in errors.splitlines() if line and not line.startswith(("Usage: envkit ", "Try 'envkit "))]
    return line


@pytest.mark.parametrize(("words", "code", "message"), WRONG, ids=[words for words, _, _ in WRONG])
def test_a_wrong_input_is_reported_in_one_line(
    words: str, code: int, message: str, folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(words.replace("PORT", str(port))))
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (code, "")
    assert message in line_of(output.err)


@pytest.mark.slow
@pytest.mark.parametrize("words", AS_PROCESSES)
def test_a_wrong_input_ends_an_installed_program_in_the_same_way(words: str, folder: Path, port: int) -> None:
    ((code, message),) = [(code, message) for known, code, message in WRONG if known == words]
    command = [str(bin_folder() / "envkit"), *shlex.split(words.replace("PORT", str(port)))]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert message in line_of(done.stderr)
