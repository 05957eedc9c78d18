"""Training on a served fleet: checks of the server of `env.url`, and the host that plays episodes on it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from envkit import __version__, clock
from envkit.config import RunConfig
from envkit.errors import ConfigError, EnvkitError, ForbiddenError, UnauthorizedError, UnreachableError, did_you_mean
from envkit.http.client.connect import read_token, trusted_context
from envkit.http.client.env_client import EnvClient
from envkit.http.client.outages import Outages
from envkit.http.protocol.messages import PROTOCOL
from envkit.protocols import EnvHost
from envkit.wiring.training.resolve import is_served_only, keys_of, policy_kind

_QUEUED_S = 10
"""Seconds that episodes wait for a slot of a full server before the run announces it."""


def check_served(run: RunConfig) -> Iterator[str]:
    """Yield the problems of the keys of a training file that depend on `env.url`, without asking the server."""
    sections = dict(zip(keys_of(run), run.envs, strict=True))
    first, *others = sections
    url = sections[first].url
    for key in others:
        for name in ("url", "token_file", "ca", "outage_timeout_s"):
            if getattr(sections[key], name) != getattr(sections[first], name):
                yield f"{key}.{name}: must be that of {first}, because one server plays all environments of a run"
    for key, section in sections.items():
        for name in ("token_file", "ca") if url is None else ():
            if getattr(section, name) is not None:
                yield f"{key}.{name}: only for a server; set {key}.url too, or leave it out"
    if url is not None and "sandbox" in run.model_fields_set:
        yield "sandbox: the server of env.url plays the episodes in its own sandboxes; leave it out"
    kind = run.imitation.kind
    if (
        run.engine.model is None
        or kind == "demonstrations"
        or (kind == "auto" and policy_kind(run) == "tiny")
        or (kind == "dialogues" and run.imitation.check_episodes)
    ):
        reason = "is not installed here, but a new tiny policy and the imitation play it in this process"
        remedy = "install its package here, or name engine.model and set imitation.kind: none"
        yield from (f"{key}.id: {one.id} {reason}; {remedy}" for key, one in sections.items() if is_served_only(one))


async def check_server(run: RunConfig) -> list[str]:
    """Return a problem if the server of `env.url` cannot play the episodes of `run`; otherwise return [].

    The problem is a line like those of `checks.check`.
    """
    (first, *_), url = keys_of(run), run.envs[0].url
    if url is None:
        return []
    try:
        async with _client(run, lambda line: None) as client:
            health, envs = await client.health(), await client.envs()
    except ConfigError as error:
        return list(error.problems)
    except (UnauthorizedError, ForbiddenError) as error:
        return [f"{first}.token_file: {error}"]
    except EnvkitError as error:
        return [f"{first}.url: {error}; start the server with envkit serve, or correct the address"]
    if health.protocol != PROTOCOL:
        versions = f"{health.protocol} (envkit {health.version}), and this envkit {__version__} speaks {PROTOCOL}"
        return [f"{first}.url: {url} speaks version {versions} of the protocol; install the same envkit on both"]
    known = [env.id for env in envs]
    if lacking := [
        f"{key}.id: {url} has no environment {section.id!r}{did_you_mean(section.id, known)}"
        for key, section in zip(keys_of(run), run.envs, strict=True)
        if section.id not in known
    ]:
        return lacking
    if client.capacity < 1:
        return [f"{first}.url: {url} has no episode slots, because all its sandboxes failed; restart it"]
    return []


@asynccontextmanager
async def served_host(run: RunConfig, announce: Callable[[str], None]) -> AsyncIterator[EnvHost]:
    """Open a host that plays episodes on the server of `env.url`.

    `announce` gets a line when the host opens, when the server stops answering, and when it is full.
    """
    outages = outages_of_run(run.envs[0].outage_timeout_s, announce)
    async with _client(run, announce, outages) as client, clock.background_tasks() as tasks:
        version = (await client.health()).version
        other = "" if version == __version__ else f"; this is envkit {__version__}"
        announce(f"environments: {client.address} (envkit {version}), {client.capacity} episode slots{other}")
        tasks.start_soon(_announce_queue, client, outages, announce)
        yield client


def outages_of_run(timeout_s: float, announce: Callable[[str], None]) -> Outages:
    """Return the outages of a training run, which ends after `timeout_s` seconds of one and can be resumed.

    Refusals of calls that may succeed later, such as those of a full server, count as an outage too.
    """

    def lost(error: EnvkitError) -> EnvkitError:
        what = "lost the server" if isinstance(error, UnreachableError) else "the server refused calls"
        remedy = "once it plays episodes again, continue the run with --resume"
        return EnvkitError(f"env.url: {what} for {timeout_s:g} s: {error}; {remedy}")

    return Outages(timeout_s, lambda line: announce(f"env.url: {line}"), is_outage=lambda error: error.retry, lost=lost)


async def _announce_queue(client: EnvClient, outages: Outages, announce: Callable[[str], None]) -> None:
    """Announce once that episodes have waited for a slot of the server for `_QUEUED_S` seconds."""
    waited_s = 0
    while waited_s < _QUEUED_S:
        await anyio.sleep(1)
        waited_s = waited_s + 1 if client.queued > outages.waiting_leases else 0
    announce(f"env.url: {client.address} is full; {client.queued} episodes wait for a slot")


def _client(run: RunConfig, warn: Callable[[str], None], outages: Outages | None = None) -> EnvClient:
    (key, *_), section, limits = keys_of(run), run.envs[0], run.rollout
    token = ca = None
    if section.token_file is not None:
        with problem_of(f"{key}.token_file"):
            token = read_token(Path(section.token_file), warn)
    if section.ca is not None:
        with problem_of(f"{key}.ca"):
            ca = Path(section.ca)
            trusted_context(ca)
    with problem_of(f"{key}.url"):
        reset_timeout_s = limits.reset_timeout_s or limits.step_timeout_s
        grade_timeout_s = limits.grade_timeout_s or math.inf
        return EnvClient(
            section.url,
            token=token,
            ca=ca,
            timeout_s=limits.step_timeout_s,
            reset_timeout_s=reset_timeout_s,
            grade_timeout_s=grade_timeout_s,
            outages=outages,
        )


@contextmanager
def problem_of(key: str) -> Iterator[None]:
    """Convert an error in a ``with`` block to a problem of the key."""
    try:
        yield
    except EnvkitError as error:
        raise ConfigError([f"{key}: {error.detail}"]) from None
