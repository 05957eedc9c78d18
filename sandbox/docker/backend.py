"""The Docker backend: each sandbox is a container of a Docker daemon.

Process 1 of a container is envkit's agent. The backend sends the agent's code over the container's standard input, so
an image needs only ``python3``, version 3.8 or newer, on its PATH. The agent exits when its standard streams close, so
a sandbox that is not detached ends with the process that started it. `envkit.sandbox.docker.container_config` makes the
container's options. A label of each container names the process that created it; when a backend is opened, it removes
containers whose process has ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Self

import anyio

from envkit.errors import SandboxError, SandboxRefusedError, SandboxStartError, UsageError
from envkit.protocols import SandboxBackend
from envkit.types import Cause, CauseKind, SandboxSpec
from envkit.types.sandboxes import SandboxLimits

from .. import agent
from ..agent_client.channel import AgentChannel, SocketStream, Stream
from ..agent_client.sandbox import AgentSandbox
from ..agent_client.teardown import HostResources
from ..egress import proxy
from ..host import layout
from ..host.instances import LiveSandboxes, refuse
from ..host.layout import CONTROL_DIR, SOCKETS, WORK
from ..snapshots import store
from . import container, container_config, orphans, seccomp_profile
from .api import Daemon, DaemonError
from .container import AttachedContainer, DiskPaths, MissingProgramError
from .container_config import DISK_LABEL, PROFILE_LABEL, Image
from .disk_quota import LEAST_FREE_MIB, DaemonDisk, DiskUse
from .images import GAMES_IMAGE, PLAIN_IMAGE, find_image, present, why_missing
from .orphans import DETACHED_LABEL, LEDGER_LABEL, SANDBOX_LABEL

__all__ = ["GAMES_IMAGE", "PLAIN_IMAGE", "DockerBackend", "default_image", "why_unavailable"]

_STARTS_AT_ONCE = 8
"""Maximum number of concurrent starts; a higher number does not increase the daemon's throughput."""
_PYTHON = "python3"
_NO_PYTHON = Cause(
    CauseKind.IMAGE_UNUSABLE,
    f"the image has no {_PYTHON} on its PATH, which the agent needs; add Python 3.8 or newer, such as python3",
)
_ATTACH_S = 10.0


async def why_unavailable(image: str | None = None) -> str | None:
    """Return in one line why Docker sandboxes cannot run here; None if they can."""
    try:
        async with aclosing(await Daemon.connect()) as daemon:
            name = None if image is None else await present(daemon, image)
            return await why_missing(daemon, name) if name and await daemon.image(name) is None else None
    except (DaemonError, UsageError) as error:
        return str(error)


async def default_image() -> str:
    """Return the image of sandboxes whose spec names none: `PLAIN_IMAGE`, or without it a base image that is here."""
    async with aclosing(await Daemon.connect()) as daemon:
        return await present(daemon, PLAIN_IMAGE)


class DockerBackend(SandboxBackend):
    """Starts sandboxes as Docker containers; implements `envkit.protocols.SandboxBackend`.

    Use it as ``async with DockerBackend() as backend``. Leaving the block stops all sandboxes except detached ones. The
    backend uses the same daemon as the Docker CLI: ``DOCKER_HOST``, or the default socket.
    """

    in_image = True

    def __init__(self) -> None:
        self._sandboxes = LiveSandboxes("docker")
        self._opened: Daemon | None = None
        self._opening = b""
        self._filter: str | None = None
        self._starting = anyio.CapacityLimiter(_STARTS_AT_ONCE)
        self._snapshots = store.SnapshotStore(self._sandboxes)
        self._images: dict[str, int] = {}
        self._run_name = ""
        self._is_leaving = False

    @property
    def distinguishes_memory_limit(self) -> bool:
        return self._daemon.distinguishes_memory_limit

    def capabilities(self) -> Mapping[str, bool]:
        """Return, by kind of limit, whether it is enforced in a sandbox with the strict profile and no open network."""
        info = self._daemon.info
        return {
            "isolation": info.get("OSType") == "linux",
            "network": True,
            "memory": bool(info.get("MemoryLimit")),
            "pids": bool(info.get("PidsLimit")),
            "cpu": bool(info.get("CpuCfsQuota")),
            "disk": True,
            "uid": True,
            "seccomp": self._filter is not None,
        }

    @property
    def machine_memory_mib(self) -> int | None:
        """Memory of the daemon's machine in MiB; None if unknown."""
        total = self._daemon.info.get("MemTotal")
        return total >> 20 if isinstance(total, int) and total else None

    async def image_names(self) -> Sequence[str]:
        """Return the names of the images on the daemon's machine."""
        return await self._daemon.image_names()

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return, for each disk of sandboxes and snapshots, its free MiB and the MiB that must stay free."""
        free_mib = self._disk.free_mib()
        return self._sandboxes.disks() | ({} if free_mib is None else {"Docker's disk": (free_mib, LEAST_FREE_MIB)})

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        return await self._start(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        return await self._start(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        if snapshot in self._images:
            return self._images[snapshot]
        return await self._snapshots.size(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; see `envkit.protocols.SandboxBackend.remove_snapshot`.

        If a sandbox still uses the snapshot's image, the image is removed only when this backend is closed.
        """
        if self._images.pop(snapshot, None) is not None:
            await self._daemon.remove_image(snapshot)
        await self._snapshots.remove(snapshot)

    async def list_detached(self, ledger: str | None = None) -> list[str]:
        """Return the ids of detached sandboxes, sorted; see `LocalBackend.list_detached`."""
        label = DETACHED_LABEL if ledger is None else f"{LEDGER_LABEL}={ledger}"
        return sorted(container["Labels"][SANDBOX_LABEL] for container in await self._daemon.containers(label))

    async def attach(self, sandbox_id: str, *, as_observer: bool = False) -> AgentSandbox:
        """Connect to a detached sandbox; see `LocalBackend.attach`."""
        found = await orphans.find_detached(self._daemon, sandbox_id)
        container_id, labels = str(found["Id"]), found["Labels"]
        stream = await self._daemon.attach(container_id, has_input=False)
        attached = AttachedContainer(self._daemon, container_id, stream, removes_itself=True)
        try:
            spec = SandboxSpec(detached=True, profile=labels[PROFILE_LABEL], disk_mib=int(labels[DISK_LABEL]))
            volumes, first, paths = await attached.places(spec)
            attached.find_agent_group(first)
            control = await SocketStream.open(container.connect(volumes))
        except BaseException:
            attached.stream.close()
            raise
        sandbox = self._sandbox(sandbox_id, attached, volumes.get(SOCKETS), spec, control, paths)
        await sandbox.reached(_ATTACH_S, as_observer=as_observer)
        return sandbox

    async def remove(self, sandbox_id: str) -> None:
        """Kill a detached sandbox; see `LocalBackend.remove`."""
        await self._daemon.remove(str((await orphans.find_detached(self._daemon, sandbox_id))["Id"]))

    async def __aenter__(self) -> Self:
        self._opened = await Daemon.connect()
        try:
            self._opening = agent.opening()
            self._filter = seccomp_profile.profile_for(self._opened.info)
            await self._sandboxes.open()
            self._run_name = self._sandboxes.folder.name
            await orphans.reap(self._daemon)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def _daemon(self) -> Daemon:
        if self._opened is None:
            raise SandboxError("the backend is not open; use 'async with'")
        return self._opened

    @property
    def _disk(self) -> DaemonDisk:
        return DaemonDisk(self._daemon)

    async def _close(self) -> None:
        self._is_leaving = True
        with anyio.CancelScope(shield=True):
            try:
                await self._sandboxes.close()
                await orphans.clear(self._daemon, self._run_name)
            finally:
                await self._daemon.aclose()
                self._opened = None

    async def _start(self, spec: SandboxSpec, snapshot: str | None) -> AgentSandbox:
        sandbox_id = f"docker-{secrets.token_hex(4)}" if spec.detached else self._sandboxes.new_id()
        self._refuse(sandbox_id, spec)
        async with self._starting:  # the start timeout does not include the wait for this limiter
            try:
                with anyio.move_on_after(spec.start_timeout_s):
                    image, files = await self._files(sandbox_id, spec, snapshot)
                    return await self._launch(sandbox_id, spec, image, files)
            except MissingProgramError:
                raise SandboxRefusedError(sandbox_id, _NO_PYTHON) from None
            except DaemonError as error:
                # The daemon refuses the spec, e.g. because it has too many CPUs or an invalid image name
                refuses = error.http_status == HTTPStatus.BAD_REQUEST
                raise (SandboxRefusedError if refuses else SandboxStartError)(sandbox_id, str(error)) from None
        raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")

    def _refuse(self, sandbox_id: str, spec: SandboxSpec) -> None:
        refuse(sandbox_id, spec, self.capabilities(), memory_mib=self.machine_memory_mib)
        if (why := container_config.why_refused(spec, self._daemon.info.get("Runtimes") or ())) is not None:
            raise SandboxRefusedError(sandbox_id, why)
        self._disk.require_room(sandbox_id, spec)

    async def _files(self, sandbox_id: str, spec: SandboxSpec, snapshot: str | None) -> tuple[Image, Path | None]:
        """Return the image to start from, and the folder of files to restore (None if there are no files to restore).

        Raises:
            SandboxRefusedError: The image or the snapshot does not exist.
        """
        files = None
        if snapshot is not None:
            files = self._snapshots.find(snapshot)
            if files is None:
                image = await self._daemon.image(snapshot)
                if image is None:
                    raise SandboxRefusedError(sandbox_id, f"there is no snapshot {snapshot!r}")
                return image, None
        return await find_image(self._daemon, sandbox_id, spec), files

    async def _launch(self, sandbox_id: str, spec: SandboxSpec, image: Image, files: Path | None) -> AgentSandbox:
        """Start a sandbox; restore the snapshot in the folder `files`, unless it is None."""
        made = container_config.options(
            spec,
            image,
            agent.command(_PYTHON),
            orphans.labels(self._run_name, sandbox_id, detached=spec.detached, ledger=spec.ledger),
            seccomp_profile=self._filter,
            agent_sets_scores=container.lends_score(self._daemon, spec),
        )
        attached = await container.run(self._daemon, made, self._opening, removes_itself=spec.detached)
        try:
            volumes, first, paths = await attached.places(spec)
            await attached.apply_limits(first, spec)
            if spec.detached and CONTROL_DIR not in volumes:
                raise SandboxRefusedError(sandbox_id, container.NOT_REACHABLE)
            if spec.profile == "system" and spec.disk_mib is not None and not paths:
                why = "watching the root file system needs root on the daemon's machine and its storage driver overlay2"
                raise SandboxRefusedError(sandbox_id, f"disk_mib={spec.disk_mib} is refused: {why}")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await attached.kill()
            raise
        sandbox = self._sandbox(sandbox_id, attached, volumes.get(SOCKETS), spec, attached.stream, paths)
        has_users = spec.profile != "system"
        env = {**proxy.variables(spec), **container_config.environment(spec, image)}
        command = store.waiting(spec.command) if files else spec.command
        config = layout.config(spec, env, proxy.waiting(spec, command), has_users=has_users)
        await sandbox.started(config, spec.start_timeout_s)
        await proxy.open_for(sandbox, spec, _PYTHON)
        if files is not None:
            await store.restore(sandbox, files, spec)
        return sandbox

    def _sandbox(
        self,
        sandbox_id: str,
        attached: AttachedContainer,
        sockets: Path | None,
        spec: SandboxSpec,
        stream: Stream,
        paths: DiskPaths | None,
    ) -> AgentSandbox:
        channel = AgentChannel(stream)
        unenforced = container_config.unenforced(spec)
        if attached.agent_group is None:
            unenforced = (*unenforced, "memory_reserve")
        use = DiskUse(SandboxLimits.of(spec).disk_mib)
        resources = HostResources(
            cause=attached.cause,
            kill=partial(self._end, attached, detached=spec.detached),
            release_resources=attached.stream.close,
            sockets=sockets,
            snapshot=lambda: self._snapshot(sandbox, spec, attached),
            unenforced=unenforced,
            diagnose=attached.diagnose,
            on_survived=None if attached.agent_group is None else attached.agent_group.forget_peaks,
            disk_percent=None if paths is None else lambda: use.percent,
        )
        sandbox = AgentSandbox(sandbox_id, channel, resources, work=WORK, forget=self._sandboxes.forget)
        self._sandboxes.add(sandbox)
        if spec.profile == "system":
            sandbox.while_alive(self._disk.monitor(channel, paths, use))
        return sandbox

    async def _end(self, attached: AttachedContainer, *, detached: bool) -> None:
        if detached and self._is_leaving:
            attached.stream.close()
        else:
            await attached.kill()

    async def _snapshot(self, sandbox: AgentSandbox, spec: SandboxSpec, attached: AttachedContainer) -> str:
        """Take a snapshot and return its name.

        The snapshot is an image of the container in the system profile, else a copy of the writable folders.
        """
        disk_mib = SandboxLimits.of(spec).disk_mib
        if spec.profile == "system":
            image, self._images[image] = await self._disk.commit(attached.id, disk_mib)
            return image
        return await self._snapshots.take(sandbox, disk_mib)
