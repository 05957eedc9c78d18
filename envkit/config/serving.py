"""The file of a fleet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from envkit.config import grammar
from envkit.config.grammar import Count, Exponent, Seconds, Section

BackendKind = Literal["auto", "local", "docker", "process", "ray", "none"]
"""What sandboxes are made of."""

Profile = Literal["strict", "system"]
Mib = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Text = Annotated[str, Field(min_length=1)]


class ListenSection(Section):
    """Where the server is reached."""

    host: Text = "127.0.0.1"
    """Name or address to listen on. Any but this machine's own loopback needs tokens (envkit token create)."""
    port: Port = 8000
    """0 takes a free one."""
    socket: Text | None = None
    """Path of a Unix socket to listen on instead."""
    certificate: Text | None = None
    """File with the certificate (PEM), for https."""
    key: Text | None = None
    """File with its private key (PEM)."""

    @model_validator(mode="after")
    def _whole(self) -> ListenSection:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together or not at all")
        return self


class NodeSection(Section):
    """What this machine can hold; a sandbox that asks for more is refused at once. Counted are the bounds of sandboxes,
    not what they use. With ray, each node says itself what it holds.
    """

    max_sandboxes: Count = 256
    """Sandboxes at once, those that serve environments included."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Processors that the bounds of its sandboxes may add up to; none does not count them."""
    memory_mib: Mib | None = None
    """MiB of memory, likewise; none takes three quarters of what the machine has, or its control group may use. A
    sandbox that asks for no bound has 1024."""
    disk_mib: Mib | None = None
    """MiB of disk, likewise; none does not count them."""
    pids: Count | None = None
    """Processes and threads, likewise; none takes half of what the machine can have. A sandbox that asks for no bound
    has 256."""


class RaySection(Section):
    """The cluster, where the backend is ray."""

    address: Text = "auto"
    """Of its head, such as 10.0.0.1:6379; auto finds it by RAY_ADDRESS or on this machine."""
    kind: Literal["local", "docker"] = "local"
    """What the sandboxes of its nodes are made of."""


class EnvsSection(Section):
    """The boxes in which environments are served; many episodes share one."""

    sandboxes: Annotated[int, Field(ge=0)] = 0
    """Number of boxes; 0 takes one for each processor, but no more than fit into half of the node."""
    capacity: Count = 1024
    """Episodes at once, spread over the boxes."""
    max_dedicated_sandboxes: Annotated[int, Field(ge=0)] = 4
    """Further boxes for worlds that do not share one: so many of their episodes run at once. None are started where no
    registered environment needs them."""
    warm: Annotated[int, Field(ge=0)] = 1
    """Further boxes that are ready to replace a lost one."""
    image: Text | None = None
    """Docker image with envkit in it; needed by the docker backend."""
    memory_mib: Mib | None = None
    """Bound on the memory of one box."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Bound on the processors of one box."""


class WarmSection(Section):
    """Sandboxes that are kept ready for who asks for exactly such a one."""

    count: Count = 1
    """How many are kept ready."""
    image: Text | None = None
    """Their image; none takes the backend's own."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Bound on processors."""
    memory_mib: Mib | None = None
    """Bound on memory."""
    pids: Count | None = None
    """Bound on processes."""
    disk_mib: Mib | None = None
    """Bound on what may be written."""
    untrusted: bool = False
    """Whether what runs inside may be hostile."""


class LivenessSection(Section):
    """When a sandbox that does not answer counts as lost. One that has ended is seen at once."""

    interval_s: Seconds = 1.0
    """Seconds between two probes."""
    suspect_s: Seconds = 1.5
    """Seconds of silence after which it is suspected."""
    lost_s: Seconds = 4.0
    """Seconds of silence after which it is lost. A box whose worlds compute for longer is not silent, unless they hold
    the interpreter's lock."""

    @model_validator(mode="after")
    def _ordered(self) -> LivenessSection:
        if not self.interval_s < self.suspect_s < self.lost_s:
            raise ValueError("interval_s is less than suspect_s, and that less than lost_s")
        return self


class ReplacementSection(Section):
    """How often what is lost is replaced: each box that serves environments, and the spares of one kind together."""

    budget: Count = 5
    """Replacements within one window; the next one waits until the first of them is out of it."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""


class LimitsSection(Section):
    """What one caller may ask for."""

    request_bytes: Count = 1 << 20
    """Size of a body, or of one frame of a socket. Files may be larger."""
    step_timeout_s: Seconds = 300.0
    """Seconds after which a step is cancelled."""
    session_ttl_s: Seconds = 600.0
    """Seconds after which a session ends that nobody uses."""
    sandbox_ttl_s: Seconds = 3600.0
    """Seconds after which a sandbox ends that nobody uses, unless its user asked for less."""
    sandboxes_per_tenant: Count | None = None
    """Sandboxes that one tenant may have at once, and without tokens all callers together; none leaves that to
    tenant_share alone."""
    tenant_share: Annotated[float, Field(gt=0, le=1), Exponent] = 0.5
    """Share that one tenant may have of each thing that is counted of the nodes, all nodes together, and of the
    episodes at once. A first one it may have in any case. Without tokens there is one tenant, and this does not bound
    it."""
    snapshots_per_tenant: Count = 100
    """Snapshots that one tenant may have; a further one is refused until one is removed."""
    snapshots_mib_per_tenant: Mib = 4096
    """MiB that the snapshots of one tenant may have together."""
    snapshots: Count = 1000
    """Snapshots that all tenants together may have."""
    snapshots_mib: Mib = 16384
    """MiB that the snapshots of all tenants together may have."""
    networks: list[Text] = Field(default_factory=lambda: ["none"])
    """What a sandbox may reach whose token has not the scope admin: none, open (everything, also this machine), and the
    hosts that its list may name, such as *.example.org."""
    profiles: list[Profile] = Field(default_factory=lambda: list[Profile](["strict"]))
    """Profiles of such a sandbox."""
    images: list[Text] = Field(default_factory=list)
    """Images of such a sandbox beside the default one, such as swe/*. To bubblewrap an image is a folder here, and all
    that is in it can be read."""
    max_buffered_mib: Mib | None = None
    """MiB of the bodies of requests and answers that the server holds at once, such as files and inputs and outputs of
    programs; one tenant may have tenant_share of it. A program that may say more than 4 MiB takes as much while it
    runs, others a sixteenth of what they may say, and then what it said. None takes a sixteenth of the memory that
    there is, 64 at least. Bodies of up to 64 KiB are not counted, nor are folders, which wait on the disk. Sockets may
    have half as much beside it."""
    calls_per_s: Annotated[float, Field(gt=0), Exponent] | None = None
    """Calls a second of one tenant, each step of a batch counted; none does not bound them."""

    @field_validator("networks")
    @classmethod
    def _patterns(cls, networks: list[str]) -> list[str]:
        for one in networks:
            if not re.fullmatch(r"[A-Za-z0-9*?.-]+", one):
                raise ValueError(f"{one!r} matches the name of no host; write none, open, or such as *.example.org")
        return networks


class AlertsSection(Section):
    """Who is told that something is about to go wrong."""

    webhook: str | None = None
    """Address that each alert is sent to, as JSON; it gets a HEAD request at the start, and a warning is printed if
    nothing answers. Alerts are events and metrics in any case."""

    @field_validator("webhook")
    @classmethod
    def _address(cls, webhook: str | None) -> str | None:
        if webhook is not None and not _is_address(webhook):
            raise ValueError("must be the address of a page, such as https://example.org/hooks/fleet")
        return webhook


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(re.fullmatch(r"https?://[!-~]+", text) and parts.hostname and parts.port != 0)
    except ValueError:  # an odd port, or half an address
        return False


class AutoscaleSection(Section):
    """Who is told that there are too few sandboxes or too many."""

    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Program that is run with one more argument, how many more sandboxes are wanted (less than 0: fewer). None: with
    ray its autoscaler is told, otherwise nobody."""
    interval_s: Seconds = 15.0
    """Seconds between two looks."""


class ServeConfig(Section):
    """A file for envkit serve."""

    backend: BackendKind = "auto"
    """local: bubblewrap. docker. process: plain child processes, which isolate nothing. ray: the nodes of a Ray
    cluster. none: environments in the server's own process, and no sandboxes. auto: local where it works, otherwise
    process, and says so."""
    listen: ListenSection = ListenSection()
    node: NodeSection = NodeSection()
    ray: RaySection = RaySection()
    envs: EnvsSection = EnvsSection()
    warm: list[WarmSection] = Field(default_factory=list)
    """Sandboxes kept ready, by kind."""
    liveness: LivenessSection = LivenessSection()
    restarts: ReplacementSection = ReplacementSection()
    limits: LimitsSection = LimitsSection()
    alerts: AlertsSection = AlertsSection()
    autoscale: AutoscaleSection = AutoscaleSection()
    access_log: Text | None = "-"
    """File that every request is written to, one line of JSON each; "-", in quotes, is standard error, null writes
    none."""
    state: Text | None = None
    """Folder of what survives a restart: leases and tokens. One server uses it at a time. None takes envkit's folder in
    the user's state folder."""


def read(path: Path | None, overrides: Sequence[str], options: Mapping[str, Any]) -> ServeConfig:
    """Read a fleet's file; see `envkit.config.grammar.read`.

    Args:
        path: The file; None for one without any key.
        overrides: ``"a.b=value"`` texts, the values read as YAML.
        options: What goes over both, such as ``{"listen.port": 0}``.
    """
    content = {} if path is None else grammar.content_of(path, example="backend: local")
    grammar.override(content, overrides)
    for key, value in options.items():
        grammar.put(content, key, value)
    return grammar.check(content, ServeConfig)
