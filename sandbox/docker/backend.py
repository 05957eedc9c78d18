"""Sandboxes of Docker: an image's files, the daemon's isolation, and processors, memory and processes that are bounded.

A container is made, attached to and started; its process 1 is our agent, which is sent in over the attached streams and
ends when they do, so that a box dies with us. What containers are made of is in
`envkit.sandbox.docker.container_config`. An image needs Python 3.7 or newer; of one that has only a shell, boxes are
what `envkit.sandbox.docker.agentless` can do.

Nothing is pulled unless that was asked for, since it may take minutes. Containers carry the name of the process that
made them; the next backend that is opened on the same machine removes those whose process is gone.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxLostError, SandboxRefusedError, SandboxStartError, UsageError
from envkit.types import Cause, CauseKind, SandboxSpec

from .. import agent
from ..agent_client.channel import AgentChannel, ChannelEndedError, SocketStream, Stream
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..egress import proxy
from ..host import layout
from ..host.instances import LiveSandboxes, refuse
from ..host.layout import AGENT_UID, CONTROL_DIR, SOCKETS, WORK
from ..snapshots import store
from . import agentless, container, container_config, orphans, seccomp_profile
from .agentless import LIFE_LINE, AgentlessSandbox
from .api import Daemon, DaemonError
from .container import AttachedContainer, MissingProgramError, Written
from .container_config import DISK_LABEL, PROFILE_LABEL, ContainerLimits, Image
from .disk_quota import LEAST_FREE_MIB, DaemonDisk, DiskUse
from .images import DEFAULT_IMAGE, find_image, why_unusable
from .orphans import SANDBOX_LABEL, LEDGER_LABEL, DETACHED_LABEL

__all__ = ["DEFAULT_IMAGE", "DockerBackend", "why_unavailable"]

_STARTS_AT_ONCE = 8
"""The daemon starts no more in a second, however many are asked for at once."""
_PYTHONS = ("python3", "python")
_SNAPSHOTS = "snapshots"
_ATTACH_S = 10.0


async def why_unavailable(image: str | None = None) -> str | None:
    """Return why there can be no sandboxes of Docker here, in one line; None if there can.

    Args:
        image: Image that they start from; None does not look for one.
    """
    try:
        daemon = await Daemon.connect()
    except (DaemonError, UsageError) as error:
        return str(error)
    try:
        return None if image is None else await why_unusable(daemon, image)
    finally:
        await daemon.close()


class DockerBackend:
    """Starts containers; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with DockerBackend() as backend``; leaving the block stops what still runs. The daemon is found as
    Docker's own program finds it (``DOCKER_HOST``, or the usual socket).

    Args:
        pull: Whether a missing image is fetched from its registry.
    """

    def __init__(self, *, pull: bool = False) -> None:
        self._pull = pull
        self._boxes = LiveSandboxes("docker")
        self._opened: Daemon | None = None
        self._opening = b""
        self._filter: str | None = None
        self._starting = anyio.CapacityLimiter(_STARTS_AT_ONCE)
        self._pythons: dict[str, str | None] = {}
        self._bounds_disk: bool | None = None  # of a root file system; unknown until it was tried
        self._snapshots = 0
        self._images: dict[str, int] = {}
        self._run_name = ""
        self._is_leaving = False

    @property
    def tells_memory_limit(self) -> bool:
        """Whether `by_agent` tells a sandbox's own memory limit from the memory of the daemon's machine."""
        return self._daemon.tells_memory_limit

    def capabilities(self) -> Mapping[str, bool]:
        """Say what is enforced in the strict profile, without a network or with one of named hosts."""
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
        """MiB of memory that the machine of the daemon has; None where it does not say."""
        total = self._daemon.info.get("MemTotal")
        return total >> 20 if isinstance(total, int) and total else None

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return the disks that boxes and snapshots need: MiB free, and with how many less none is started."""
        free_mib = self._disk.free_mib()
        return self._boxes.disks() | ({} if free_mib is None else {"Docker's disk": (free_mib, LEAST_FREE_MIB)})

    async def image(self, name: str) -> Image | None:
        """Return what is known of an image; None when there is no such."""
        return await self._daemon.image(name)

    async def start(self, spec: SandboxSpec) -> AgentSandbox | AgentlessSandbox:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`.

        Raises:
            SandboxRefusedError: Also when the image is missing.
            SandboxStartError: Also when the disk is nearly full, or the daemon does not answer.
        """
        return await self._start(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox | AgentlessSandbox:
        """Start a box with the files of `snapshot`; see `envkit.protocols.SandboxBackend.restore`."""
        return await self._start(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return what a snapshot takes of the disk; see `envkit.protocols.SandboxBackend.snapshot_bytes`."""
        if snapshot in self._images:
            return self._images[snapshot]
        return await clock.to_thread(store.size, self._boxes.folder / _SNAPSHOTS, snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; see `envkit.protocols.SandboxBackend.remove_snapshot`.

        An image that a box was started from stays as long as this backend is open.
        """
        if self._images.pop(snapshot, None) is not None:
            await self._daemon.remove_image(snapshot)
        await clock.to_thread(store.remove, self._boxes.folder / _SNAPSHOTS, snapshot)

    async def staying(self, ledger: str | None = None) -> list[str]:
        """Return the ids of the boxes that stay on this machine, or of those of one ledger, sorted; "" is none."""
        label = DETACHED_LABEL if ledger is None else f"{LEDGER_LABEL}={ledger}"
        return sorted(one["Labels"][SANDBOX_LABEL] for one in await self._daemon.containers(label))

    async def attach(self, sandbox_id: str, *, observes: bool = False) -> AgentSandbox:
        """Return a box that stays, which this or another process started; leaving the backend leaves it running.

        With `observes` it is only looked at: the time after which it ends when it is left alone is not restarted.

        Raises:
            SandboxError: No box of this id stays on this machine.
            UnreachableError: It does not let us in.
        """
        found = await orphans.staying(self._daemon, sandbox_id)
        container_id, labels = str(found["Id"]), found["Labels"]
        stream = await self._daemon.attach(container_id, has_input=False)
        held = AttachedContainer(self._daemon, container_id, stream, removes_itself=True)
        try:
            spec = SandboxSpec(detached=True, profile=labels[PROFILE_LABEL], disk_mib=int(labels[DISK_LABEL]))
            volumes, written = await held.volumes(), await held.written(spec)
            await held.find_agent_group(volumes)
            door = container.knock(volumes)
        except BaseException:
            held.stream.close()
            raise
        box = self._box(sandbox_id, held, volumes.get(SOCKETS), spec, SocketStream(door), written)
        await box.reached(_ATTACH_S, observes=observes)
        return box

    async def dial(self, sandbox_id: str) -> socket.socket:
        """Return a connected, non-blocking stream to a box that stays, which speaks what a `AgentChannel` does.

        The caller closes it; for as long as it is open the box is not lonely. Raises as `attach`.
        """
        found = await orphans.staying(self._daemon, sandbox_id)
        return container.knock(await container.volumes(self._daemon, str(found["Id"])))

    async def remove(self, sandbox_id: str) -> None:
        """End a box that stays, also one that does not answer; raises `SandboxError` as `attach`."""
        await self._daemon.remove(str((await orphans.staying(self._daemon, sandbox_id))["Id"]))

    async def __aenter__(self) -> Self:
        self._opened = await Daemon.connect()
        try:
            self._opening = agent.opening()
            self._filter = seccomp_profile.profile_for(self._opened.info)
            await self._boxes.open()
            self._run_name = self._boxes.folder.name
            await orphans.reap(self._daemon)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                await self._boxes.close()
                await orphans.clear(self._daemon, self._run_name)
            finally:
                await self._daemon.close()
                self._opened = None

    async def _start(self, spec: SandboxSpec, snapshot: str | None) -> AgentSandbox | AgentlessSandbox:
        sandbox_id = f"docker-{secrets.token_hex(4)}" if spec.detached else self._boxes.new_id()
        self._refuse(sandbox_id, spec)
        async with self._starting:  # whose turn has not come has not begun
            try:
                with anyio.move_on_after(spec.start_timeout_s):
                    image, files = await self._files(sandbox_id, spec, snapshot)
                    return await self._launch(_Plan(sandbox_id, spec, image, files))
            except DaemonError as error:
                refuses = error.http_status == HTTPStatus.BAD_REQUEST  # more processors than there are, an odd name
                raise (SandboxRefusedError if refuses else SandboxStartError)(sandbox_id, str(error)) from None
        raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")

    def _refuse(self, sandbox_id: str, spec: SandboxSpec) -> None:
        refuse(sandbox_id, spec, self.capabilities(), memory_mib=self.machine_memory_mib)
        if (why := container_config.why_refused(spec, self._daemon.info.get("Runtimes") or ())) is not None:
            raise SandboxRefusedError(sandbox_id, why)
        self._disk.require_room(sandbox_id, spec)

    async def _files(self, sandbox_id: str, spec: SandboxSpec, snapshot: str | None) -> tuple[Image, Path | None]:
        """Return the image to start from, and the folder of what is to be put back into it.

        Raises:
            SandboxRefusedError: There is no such image or snapshot.
        """
        files = None
        if snapshot is not None:
            files = store.find(self._boxes.folder / _SNAPSHOTS, snapshot)
            if files is None:
                image = await self._daemon.image(snapshot)
                if image is None:
                    raise SandboxRefusedError(sandbox_id, f"there is no snapshot {snapshot!r}")
                return image, None
        return await find_image(self._daemon, sandbox_id, spec, pull=self._pull), files

    async def _launch(self, plan: _Plan) -> AgentSandbox | AgentlessSandbox:
        """Start with the image's Python, which is looked for once for each image, or without."""
        pythons = self._pythons
        for python in (pythons[plan.image.id],) if plan.image.id in pythons else _PYTHONS:
            if python is None:
                break
            try:
                box = await self._launch_agent(plan, python)
            except MissingProgramError:
                continue
            pythons[plan.image.id] = python
            return box
        fallback_box = await self._launch_fallback(plan)
        pythons[plan.image.id] = None
        return fallback_box

    async def _launch_agent(self, plan: _Plan, python: str) -> AgentSandbox:
        spec = plan.spec
        held = await self._run(plan, agent.command(python), self._opening)
        try:
            volumes, written = await held.restricted(spec), await held.written(spec)
            if spec.detached and CONTROL_DIR not in volumes:
                raise SandboxRefusedError(plan.sandbox_id, container.NO_WAY_BACK)
            if spec.profile == "system" and spec.disk_mib is not None and not (written or self._bounds_disk):
                why = "Docker bounds a root file system only on xfs with project quota, and only root can watch one"
                raise SandboxRefusedError(plan.sandbox_id, f"disk_mib={spec.disk_mib} is refused: {why}")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await held.kill()
            raise
        box = self._box(plan.sandbox_id, held, volumes.get(SOCKETS), spec, held.stream, written)
        has_users = spec.profile != "system"
        env = {**proxy.variables(spec), **container_config.environment(spec, plan.image)}
        command = store.waiting(spec.command) if plan.files else spec.command
        config = layout.config(spec, env, proxy.waiting(spec, command), has_users=has_users)
        await box.started(config, spec.start_timeout_s)
        await proxy.open_for(box, spec, python)
        if plan.files is not None:
            await store.put_back(box, plan.files, spec, AGENT_UID if has_users else None)
        return box

    async def _launch_fallback(self, plan: _Plan) -> AgentlessSandbox:
        spec = plan.spec
        if (why := agentless.why_refused(spec, has_snapshot=plan.files is not None)) is not None:
            raise SandboxRefusedError(plan.sandbox_id, Cause(CauseKind.IMAGE_UNUSABLE, why))
        try:
            held = await self._run(plan, LIFE_LINE, b"")
        except MissingProgramError:
            cause = Cause(CauseKind.IMAGE_UNUSABLE, "its image has neither Python nor a shell")
            raise SandboxRefusedError(plan.sandbox_id, cause) from None
        env = container_config.environment(spec, plan.image)
        box = AgentlessSandbox(plan.sandbox_id, self._daemon, held, env=env, forget=self._boxes.forget)
        self._boxes.add(box)
        try:
            await box.probe(spec.start_timeout_s)
        except BaseException:
            await box.stop()
            raise
        return box

    async def _run(self, plan: _Plan, argv: Sequence[str], opening: bytes) -> AttachedContainer:
        """Start the box's container; as `container.run`."""
        spec = plan.spec
        labels = orphans.labels(self._run_name, plan.sandbox_id, stays=spec.detached, ledger=spec.ledger)
        options = partial(container_config.options, spec, plan.image, argv, labels, system_calls=self._filter)
        if spec.profile == "system" and self._bounds_disk is not False:
            try:
                held = await container.run(self._daemon, options(bounds_disk=True), opening)
            except DaemonError as error:
                if "storage" not in str(error):  # library's message: docker
                    raise
                self._bounds_disk = False
            else:
                self._bounds_disk = True
                return held
        own = container.lends_score(self._daemon, spec)
        made = options(has_agent=argv is not LIFE_LINE, agent_sets_scores=own)
        return await container.run(self._daemon, made, opening)

    def _box(
        self,
        sandbox_id: str,
        held: AttachedContainer,
        sockets: Path | None,
        spec: SandboxSpec,
        stream: Stream,
        written: Written | None,
    ) -> AgentSandbox:
        channel = AgentChannel(stream)
        lost = container_config.unenforced(spec, bounds_disk=bool(self._bounds_disk))
        unenforced = lost if held.agent_group is not None else (*lost, "memory_reserve")
        use = DiskUse(ContainerLimits.of(spec).disk_mib)
        hold = HostResources(
            cause=held.cause,
            kill=partial(self._end, held, detached=spec.detached),
            let_go=held.stream.close,
            sockets=sockets,
            snapshot=partial(self._snapshot, sandbox_id, spec, held, channel),
            unenforced=unenforced,
            look=held.look,
            on_survived=None if held.agent_group is None else held.agent_group.forget_peaks,
            disk_percent=None if written is None else lambda: use.percent,
        )
        box = AgentSandbox(sandbox_id, channel, hold, work=WORK, forget=self._boxes.forget)
        self._boxes.add(box)
        if spec.profile == "system":
            box.while_alive(self._disk.watch(channel, written, use))
        return box

    async def _end(self, held: AttachedContainer, *, detached: bool) -> None:
        if detached and self._is_leaving:
            held.stream.close()
        else:
            await held.kill()

    async def _snapshot(
        self, sandbox_id: str, spec: SandboxSpec, held: AttachedContainer, channel: AgentChannel
    ) -> str:
        """Keep the files of a box: as an image where all can be written, else what lies in its places for that."""
        disk_mib = ContainerLimits.of(spec).disk_mib
        if spec.profile == "system":
            image, self._images[image] = await self._disk.commit(held.id, disk_mib)
            return image
        self._snapshots += 1
        name = f"snapshot-{self._snapshots}"
        try:
            extent = store.Extent(disk_mib, AGENT_UID)
            await store.keep(channel, self._boxes.folder / _SNAPSHOTS / name, extent)
        except ChannelEndedError:
            raise SandboxLostError(
                sandbox_id, Cause(CauseKind.UNKNOWN, "it ended while a snapshot was taken")
            ) from None
        return name


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to start: the box's id and spec, its image, and the folder with what is to be put back into it."""

    sandbox_id: str
    spec: SandboxSpec
    image: Image
    files: Path | None
