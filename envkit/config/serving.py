"""Configuration file of `envkit serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from envkit.config import grammar
from envkit.config.grammar import Count, Seconds, Section, UserPath
from envkit.config.parts import LivenessSection, RestartSection

BackendKind = Literal["auto", "local", "docker", "process", "nodes", "none"]
"""Kind of sandbox backend."""

Profile = Literal["strict", "system"]
Mib = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Text = Annotated[str, Field(min_length=1)]


class ListenSection(Section):
    """Address of the server."""

    host: Text = "127.0.0.1"
    """Host name or address to listen on. All addresses except loopback require tokens (envkit token create)."""
    port: Port = 8000
    """Port; 0 picks a free one."""
    socket: UserPath | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    certificate: UserPath | None = None
    """File with the TLS certificate (PEM), for https."""
    key: UserPath | None = None
    """File with the private key of the certificate (PEM)."""

    @model_validator(mode="after")
    def _whole(self) -> ListenSection:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("set both certificate and key, or neither")
        return self

    @property
    def address(self) -> dict[str, Any]:
        """The arguments of `envkit.http.server.server.serve`."""
        files = {name: None if file is None else Path(file) for name, file in self if name in ("certificate", "key")}
        return {"host": self.host, "port": self.port, "uds": self.socket, **files}


class NodeSection(Section):
    """Capacity of this machine. A sandbox counts with its limits, not with what it uses. A sandbox that would not fit
    even if no other sandbox ran is refused immediately. All sandboxes together have at most half of the machine's
    processes and threads; one without a limit counts as 256. Each of the `nodes` has its own capacity.
    """

    max_sandboxes: Count = 256
    """Maximum number of sandboxes, including those that serve environments."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Maximum sum of the CPU limits of all sandboxes; null for no maximum."""
    memory_mib: Mib | None = None
    """Maximum sum of the memory limits in MiB; null for three quarters of the memory of the machine or its cgroup. A
    sandbox without a limit counts as 1024."""
    disk_mib: Mib | None = None
    """Maximum sum of the disk limits in MiB; null for no maximum."""


class NodeAddressSection(Section):
    """A node: another machine that runs envkit serve --node. Others join by themselves (envkit serve --node --join)."""

    url: Text
    """Address of the node, such as http://10.0.0.7:8000. Its host and port are the name of the node."""
    token_file: UserPath | None = None
    """File with the token of the node: the file that its --token-file names. null: the node needs none."""


class EnvsSection(Section):
    """Sandboxes that serve environments; many episodes share one sandbox."""

    sandboxes: Annotated[int, Field(ge=0)] = 0
    """Number of sandboxes. 0: one per CPU, but no more than fit into half of the node's capacity."""
    capacity: Count = 1024
    """Maximum number of concurrent episodes, spread over the sandboxes."""
    warm: Annotated[int, Field(ge=0)] = 1
    """Number of additional sandboxes that are ready to replace a lost sandbox."""
    image: Text | None = None
    """Image with envkit installed, for the backend docker and for nodes with Docker. null: envkit/games:1; on nodes, no
    image: they run environments with the Python of this server's path."""
    memory_mib: Mib | None = None
    """Memory limit of one sandbox."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPU limit of one sandbox."""
    tool_episodes: Count = 8
    """Maximum number of concurrent episodes of environments that use sandboxes as tools. One process plays them, with
    the rights of the server."""
    trusted: list[Text] | None = None
    """Ids of the environments that may use the server's sandboxes as tools. null: all installed ones that need it."""
    judge: Text | None = None
    """Language model that grades answers, as MODEL@URL of an endpoint with OpenAI's API, whose key is in
    OPENAI_API_KEY. null: environments that need one cannot be played."""


class WarmSection(Section):
    """Warm sandboxes: sandboxes with this spec that are started before a client requests one with the same spec."""

    count: Count = 1
    """Number of sandboxes to keep ready."""
    image: Text | None = None
    """Image; null for the backend's default."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPU limit."""
    memory_mib: Mib | None = None
    """Memory limit."""
    pids: Count | None = None
    """Limit on processes."""
    disk_mib: Mib | None = None
    """Disk limit of each writable folder."""
    untrusted: bool = False
    """Whether the code inside may be hostile."""


class LimitsSection(Section):
    """Limits on callers."""

    request_bytes: Count = 1 << 20
    """Maximum size of a request body or WebSocket message. Files may be larger."""
    step_timeout_s: Seconds = 300.0
    """Seconds after which a step is cancelled."""
    reset_timeout_s: Seconds = 600.0
    """Seconds after which a reset is cancelled."""
    grade_timeout_s: Seconds = 600.0
    """Seconds after which the grader of an episode is cancelled."""
    session_ttl_s: Seconds = 600.0
    """Seconds without use after which a session expires."""
    sandbox_ttl_s: Seconds = 3600.0
    """Seconds without use after which a sandbox expires, unless its creator asked for a shorter time."""
    sandboxes_per_tenant: Count | None = None
    """Maximum number of concurrent sandboxes per tenant; without tokens all callers are one tenant. null: only
    tenant_share applies."""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Maximum share of one tenant in each resource of all nodes, and in the concurrent episodes. The first sandbox or
    episode of a tenant is always allowed. Not applied without tokens."""
    networks: list[Text] = Field(default_factory=lambda: ["none"])
    """Networks allowed to tokens without the scope admin: none, open (everything, including this machine), and patterns
    of host names that an allowlist may contain, such as *.example.org."""
    profiles: list[Profile] = Field(default_factory=lambda: list[Profile](["strict"]))
    """Profiles allowed to tokens without the scope admin."""
    images: list[Text] = Field(default_factory=list)
    """Images, or patterns such as swe/*, allowed to tokens without the scope admin, besides the default image. For
    bubblewrap, an image is a folder of this machine, and the sandbox can read everything in it."""

    @field_validator("networks")
    @classmethod
    def _patterns(cls, networks: list[str]) -> list[str]:
        for one in networks:
            if not re.fullmatch(r"[A-Za-z0-9*?.-]+", one):
                raise ValueError(f"{one!r} is not a host pattern; use none, open, or a pattern such as *.example.org")
        return networks


class AlertsSection(Section):
    """Alerts for operators."""

    webhook: str | None = None
    """URL to which each alert is posted as JSON. Alerts also appear in the log and the metrics."""

    @field_validator("webhook")
    @classmethod
    def _address(cls, webhook: str | None) -> str | None:
        if webhook is not None and not is_http_url(webhook):
            raise ValueError("must be an http or https URL, such as https://example.org/hooks/fleet")
        return webhook


def is_http_url(text: str) -> bool:
    """Return whether a text is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        return bool(re.fullmatch(r"https?://[!-~]+", text) and parts.hostname and parts.port != 0)
    except ValueError:  # an invalid port or address
        return False


class ServeConfig(Section):
    """Configuration of envkit serve."""

    backend: BackendKind = "auto"
    """local: bubblewrap. docker: Docker containers. process: child processes without isolation. nodes: sandboxes only
    on other machines, which are listed in `nodes` or join. none: no sandboxes; environments run in the server's
    process. auto: local if it works, otherwise docker if it works and has the image, otherwise process, with a
    warning."""
    listen: ListenSection = ListenSection()
    node: NodeSection = NodeSection()
    nodes: list[NodeAddressSection] = Field(default_factory=list)
    """Other machines whose sandboxes the server uses, beside its own ones or, with the backend nodes, instead of them.
    """
    envs: EnvsSection = EnvsSection()
    model: Text | None = None
    """Language model that clients call like those of OpenAI and Anthropic, at /v1/chat/completions, /v1/responses and
    /v1/messages, with a token of the scope play as API key: NAME, as in engine.model of training files, for one in a
    process of this server, or NAME@URL for one on a running vLLM server (envkit vllm NAME). null: none."""
    warm: list[WarmSection] = Field(default_factory=list)
    """Warm sandboxes, one entry per spec."""
    liveness: LivenessSection = LivenessSection()
    restarts: RestartSection = RestartSection()
    limits: LimitsSection = LimitsSection()
    alerts: AlertsSection = AlertsSection()
    drain_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a shutdown waits until the running episodes have ended, while it starts no new ones. Above 0, the
    server also leaves its sandboxes running for the next server, if it records leases (docs/operate-a-fleet.md,
    section Upgrade). 0: it waits for running requests only, and stops every sandbox."""
    access_log: UserPath | None = "-"
    """File of the access log, with one JSON line per request. "-" (quoted): stderr. null: no access log."""
    state: UserPath | None = None
    """Folder for leases and tokens, which survive a restart. Only one server can use it at a time. null:
    ~/.local/state/envkit, or envkit in $XDG_STATE_HOME."""


def read(path: Path | None, overrides: Sequence[str], options: Mapping[str, Any]) -> ServeConfig:
    """Read a file, then ``"a.b=value"`` strings with YAML values, then `options` by dotted key.

    Raises:
        ConfigError: The file cannot be read, or a value is invalid.
    """
    content = {} if path is None else grammar.content_of(path, example="backend: local")
    grammar.override(content, overrides)
    for key, value in options.items():
        grammar.put(content, key, value)
    return grammar.check(content, ServeConfig)
