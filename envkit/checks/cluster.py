"""Checks the other machines that a server file or a training file names: whether they answer, and fit together."""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from envkit import __version__, clock
from envkit.config import RunConfig, grammar, serving, training
from envkit.config.parts import VllmEngineSection
from envkit.config.serving import ListenSection, NodeAddressSection, ServeConfig
from envkit.errors import EnvkitError, ForbiddenError, UnauthorizedError, UnknownPathError, UnreachableError, UsageError
from envkit.fleet.remote_node import RemoteNode
from envkit.http.client.connect import read_token
from envkit.http.client.sandbox_client import SandboxClient
from envkit.http.protocol.node_messages import NodeReply
from envkit.protocols import Launcher
from envkit.sandbox.docker.backend import GAMES_IMAGE
from envkit.trainer_bridge.engines.vllm.plugin.envkit_fetch import MANIFEST
from envkit.trainer_bridge.weights.served import WeightServer
from envkit.types import THIS_NODE, Node, Place, Weights
from envkit.wiring.gateway.remote_nodes import name_of, why_unfit
from envkit.wiring.launch import open_launcher

_MACHINE_S = 20.0
"""Seconds that a machine has to answer; all are asked at the same time."""
_SKEW_S = 5.0
_LAUNCH_S = 40.0
_START = "start it, or open its port in the firewall"
_PROBE = """
import json, pathlib, platform, sys, time, urllib.request
import envkit
problem = ""
for name in sys.argv[1:]:
    try:
        if name.startswith("http"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(name, timeout=10).read()
        else:
            pathlib.Path(name + ".back").write_bytes(pathlib.Path(name).read_bytes())
    except OSError as error:
        problem = str(error)
print(json.dumps([time.time(), envkit.__version__, platform.machine(), problem]))
"""
"""Program that is run on each machine of a launcher, with a file to copy, or a URL to fetch."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a machine. If something is wrong, `remedy` says what to do; otherwise it is empty."""

    machine: str
    check: str
    result: str
    remedy: str = ""


async def examine_cluster(file: Path) -> list[Finding]:
    """Check each machine that `file` names. It takes at most a minute.

    Raises:
        ConfigError: The file cannot be read, or is neither a server file nor a training file.
    """
    is_run = "env" in grammar.content_of(file, example="backend: nodes")
    survey = _Survey()
    async with anyio.create_task_group() as tasks:
        if is_run:
            await survey.see_run(training.load(file), tasks)
        else:
            config = survey.config = serving.read(file, [], {})
            for section in config.nodes:
                tasks.start_soon(survey.ask_node, name_of(section.url), section)
            tasks.start_soon(survey.ask_gateway, _address(config.listen), None, config.listen.certificate)
    return sorted(survey.found, key=lambda one: one.machine)  # stable: the checks of a machine keep their order


@dataclass
class _Survey:
    found: list[Finding] = field(default_factory=list)
    config: ServeConfig | None = None

    async def see_run(self, run: RunConfig, tasks: anyio.abc.TaskGroup) -> None:
        for env in run.envs:
            if env.url is not None:
                tasks.start_soon(self.ask_gateway, env.url, env.token_file, env.ca)
        for url in getattr(run.engine, "urls", ()):
            tasks.start_soon(self._engine, url)
        folder = getattr(run.engine, "weights_folder", None)
        fetches = isinstance(run.engine, VllmEngineSection) and not run.engine.urls and folder is None
        address = getattr(run.engine, "weights_url", None)
        try:
            launcher = await open_launcher(run.placement.launcher)
            server = WeightServer(address) if fetches else None
        except UsageError as error:
            remedy = "correct placement.launcher, use a free port, or end the run that has it"
            self.found.append(Finding("here", "cluster", str(error), remedy))
            return
        async with AsyncExitStack() as parts, anyio.create_task_group() as launched:
            if server is not None:
                parts.push_async_callback(server.close)
            for node in launcher.nodes:
                used = server if address is not None or node.name != THIS_NODE else None  # others read the files
                launched.start_soon(self._launched, launcher, node, None if folder is None else Path(folder), used)

    async def _launched(self, launcher: Launcher, node: Node, folder: Path | None, server: WeightServer | None) -> None:
        """Run a program on a machine of the cluster. Send it a file through the folder for weights, or by HTTP."""
        name, began = f"{node.name} ({node.host})", clock.wall()
        file = None if folder is None else folder / f".envkit-doctor-{uuid.uuid4().hex}"
        copy = None if file is None else file.with_name(f"{file.name}.back")
        try:
            if file is not None:
                file.write_bytes(file.name.encode())
        except OSError as error:
            remedy = "mount it, or let this user write to it"
            self.found.append(Finding("here", "weights", f"{folder}: {error.strerror}", remedy))
            return
        url = None
        if server is not None:
            try:
                with TemporaryDirectory(prefix="envkit-doctor-") as empty:
                    url = f"{await server.offer(Weights(1, empty), f'http://{node.address}')}/{MANIFEST}"
            except OSError as error:
                remedy = "connect this machine to its network, or set engine.weights_url to an address that it reaches"
                self.found.append(Finding(name, "weights", f"{node.address}: {error.strerror}", remedy))
        words = [sys.executable, "-c", _PROBE, *(str(one) for one in (file, url) if one is not None)]
        process = await launcher.start(words, {}, place=Place(node.name), name="doctor")
        try:
            why = f"it did not end within {_LAUNCH_S:g} s"
            with anyio.move_on_after(_LAUNCH_S):
                why = await process.wait()
            lines = process.log.read_text(errors="replace").splitlines() or [why]
            at_s, version, architecture, problem = msgspec.json.decode(lines[-1], type=tuple[float, str, str, str])
        except msgspec.MsgspecError:
            remedy = f"install envkit there for {sys.executable}; {process.log} has the output"
            self.found.append(Finding(name, "start", f"{why}: {lines[-1]}", remedy))
        else:
            process.log.unlink()
            self.found.append(Finding(name, "start", "runs programs"))
            self.found += _fit(name, at_s - min(max(at_s, began), clock.wall()), version, architecture)
            if copy is not None:
                if not problem and (not copy.exists() or copy.read_text() != copy.stem):
                    problem = "a file that it wrote is not there on this machine"
                remedy = f"mount the same {folder} there, for this user" if problem else ""
                self.found.append(Finding(name, "weights", problem or f"{folder} is shared", remedy))
            if url is not None:
                base = url.removesuffix(urlsplit(url).path)
                remedy = f"open {base} in the firewall, or set engine.weights_url to an address that it reaches"
                result = f"cannot fetch from {base}: {problem}" if problem else f"fetches from {base}"
                self.found.append(Finding(name, "weights", result, remedy if problem else ""))
        finally:
            await process.kill(grace_s=0)
            for one in (file, copy):
                if one is not None:
                    one.unlink(missing_ok=True)

    async def ask_node(self, name: str, section: NodeAddressSection) -> None:
        """Ask a node that the server's file lists."""
        try:
            with anyio.fail_after(_MACHINE_S):
                async with RemoteNode(name, section.url, _token(section.token_file)) as node:
                    facts = node.facts
        except (EnvkitError, TimeoutError) as error:
            self.found.append(_failure(name, error, "name the file with its token (token_file)"))
        else:
            self.found += [Finding(name, "port", f"{section.url} answers"), Finding(name, "token", "accepted")]
            self.found += self._facts(name, facts)

    async def ask_gateway(self, url: str, token_file: Path | str | None, ca: Path | str | None) -> None:
        """Ask a server about its nodes, except those that its file lists."""
        listed = {name_of(one.url) for one in self.config.nodes} if self.config else set()
        try:
            with anyio.fail_after(_MACHINE_S):
                async with SandboxClient(url, _token(token_file), ca=ca) as client:
                    self.found.append(Finding("gateway", "port", f"{url} answers"))
                    statuses = [one for one in await client.list_nodes() if one.node not in listed]
        except ForbiddenError:
            self.found.append(Finding("gateway", "nodes", "not checked, for want of a token with the scope admin"))
        except UnknownPathError:
            self.found.append(Finding("gateway", "nodes", "none; its sandboxes are on its own machine"))
        except (EnvkitError, TimeoutError) as error:
            found = _failure("gateway", error)  # a gateway need not run for its listed nodes to be checked
            remedy = "" if listed and isinstance(error, UnreachableError) else found.remedy
            self.found.append(Finding("gateway", found.check, found.result, remedy))
        else:
            for one in statuses:
                is_lost = one.state == "lost" or one.facts is None
                self.found.append(
                    Finding(one.node, "state", f"{one.state} {one.why}".strip(), _START if is_lost else "")
                )
                if one.facts is not None:
                    self.found += self._facts(one.node, one.facts)

    def _facts(self, name: str, facts: NodeReply) -> Iterator[Finding]:
        """Check what a node reports, against this machine and the server's file."""
        yield from _fit(name, facts.at_s - clock.wall(), facts.version, facts.architecture)
        if self.config is None:
            return
        image = self.config.envs.image
        if (why := why_unfit(facts, in_image=image is not None, isolates=None)) is not None:
            yield Finding(name, "backend", facts.backend, why)
        elif facts.backend != "docker":
            remedy = "" if facts.python == sys.executable else f"install envkit there for {sys.executable}"
            yield Finding(name, "python", facts.python, remedy)
        else:
            for wanted in sorted({image or GAMES_IMAGE, *(one.image for one in self.config.warm if one.image)}):
                remedy = "" if wanted in facts.images else f"it is missing; run there: docker pull {wanted}"
                yield Finding(name, "image", wanted, remedy)

    async def _engine(self, url: str) -> None:
        """Ask a vLLM server whether it works."""
        try:
            async with httpx.AsyncClient(timeout=_MACHINE_S / 2) as client:
                status = (await client.get(f"{url.rstrip('/')}/health")).status_code
        except httpx.HTTPError as error:
            self.found.append(Finding(url, "port", f"no answer: {error}", _START))
        else:
            self.found.append(Finding(url, "health", f"status {status}", "" if status == 200 else "see its log"))


def _fit(name: str, skew_s: float, version: str, architecture: str) -> Iterator[Finding]:
    """Compare a machine with this one."""
    yield Finding(name, "clock", f"{skew_s:+.1f} s", "set the clocks by NTP" if abs(skew_s) > _SKEW_S else "")
    remedy = "" if version == __version__ else f"install envkit {__version__} there"
    yield Finding(name, "version", f"envkit {version}", remedy)
    here = platform.machine()
    remedy = "" if architecture == here else f"use machines like this one, {here}: results may differ"
    yield Finding(name, "architecture", architecture, remedy)


def _address(listen: ListenSection) -> str:
    if listen.socket is not None:
        return f"unix:{listen.socket}"
    host = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
    return f"http{'s' if listen.certificate else ''}://{f'[{host}]' if ':' in host else host}:{listen.port}"


def _token(file: Path | str | None) -> str | None:
    return None if file is None else read_token(Path(file), lambda line: None)


def _failure(
    name: str, error: Exception, token: str = "name the file with its token (token_file), or set ENVKIT_TOKEN"
) -> Finding:
    if isinstance(error, (UnauthorizedError, ForbiddenError)):
        return Finding(name, "token", str(error), token)
    if isinstance(error, (UnreachableError, TimeoutError)):
        return Finding(name, "port", str(error) or f"no answer within {_MACHINE_S:g} s", _START)
    remedy = "name another file" if isinstance(error, UsageError) else "something else answers there; correct the URL"
    return Finding(name, "address", str(error), remedy)
