"""The status page of the server at ``/``, in HTML without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from envkit import __version__, clock
from envkit.http.protocol import messages
from envkit.http.sessions.session import Session
from envkit.registry import EnvSpec
from envkit.types import CauseKind, SandboxState, SandboxView, TenantKey

REFRESH_S = 5
"""Seconds after which a browser reloads the page."""

MAX_LOST = 20
"""Maximum number of lost sandboxes that the page lists; if there are more, it lists the most recently lost."""

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)

CHALLENGE = (b"www-authenticate", b'Basic realm="envkit: any user name; the token is the password", charset="UTF-8"')
"""Header of the answer to a request without a valid token, with which a browser asks for one."""

LINKS = {
    "/openapi.json": "API document (OpenAPI)",
    "/metrics": "metrics (Prometheus)",
    f"/v{messages.PROTOCOL}/health": "liveness of the server",
    f"/v{messages.PROTOCOL}/ready": "readiness: whether a session can be created now",
}

_LOST = SandboxState.LOST.value
_FINISHED = "finished"
_STATES = {
    SandboxState.STARTING.value: "starting",
    SandboxState.READY.value: "warm, ready to be leased",
    SandboxState.LEASED.value: "in use",
    SandboxState.SUSPECT.value: "in use, not responding",
    _LOST: "lost while healthy, in the last 10 minutes",
    _FINISHED: "its command exited, in the last 10 minutes",
    SandboxState.STOPPED.value: "stopped or failed to start, in the last 10 minutes",
}

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0}th,td{text-align:left;padding:.2rem 1rem .2rem 0;vertical-align:top}"
    "th{border-bottom:1px solid #888}td.n{text-align:right}.bad{color:#b00020;font-weight:bold}"
)


@dataclass(frozen=True, slots=True)
class Overview:
    """The part of the server's state that the status page shows to one caller.

    Attributes:
        ready: Whether a session can be created now.
        envs: The environments; None if the caller lacks the scope ``play``.
        sessions: The sessions that the caller may see; None if the caller lacks the scope ``play``.
        sandboxes: The sandboxes that the caller may see; None if the caller lacks the scope ``sandbox``, or the server
            lends no sandboxes.
        name: Returns the name that the caller uses for the sandbox with the given key.
    """

    ready: messages.ReadyReply
    envs: Sequence[EnvSpec] | None
    sessions: Sequence[Session] | None
    sandboxes: Sequence[SandboxView] | None
    name: Callable[[TenantKey], str]


def page(overview: Overview | None) -> bytes:
    """Return the status page as HTML.

    `overview` is None for a caller without the necessary token, whose page contains only the version and links.
    """
    parts = [f"<h1>envkit {escape(__version__)}</h1>", "<p>Server for environments and sandboxes.</p>"]
    if overview is None:
        parts.append(
            "<p>To see more, reload the page and sign in: any user name, and a token as the password. With curl: "
            "<code>curl -u :ek_... URL</code></p>"
        )
    else:
        parts += _sections(overview)
    links = [(f'<a href="{path}">{path}</a>', escape(text)) for path, text in LINKS.items()]
    parts.append("<h2>Links</h2>" + _table(["path", ""], links))
    refresh = "" if overview is None else f'<meta http-equiv="refresh" content="{REFRESH_S}">'
    head = f'<meta charset="utf-8"><title>envkit</title>{refresh}<style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'.encode()


def _sections(overview: Overview) -> Iterable[str]:
    ready = overview.ready
    state = "Ready" if ready.ready else f'<span class="bad">Not ready: {escape(ready.why)}</span>'
    yield f"<p>{state}. {ready.leased} of {ready.capacity} episode slots in use.</p>"
    yield f"<p>As of {_time(clock.wall())} UTC; reloaded every {REFRESH_S} s.</p>"
    if overview.sandboxes is not None:
        yield "<h2>Sandboxes</h2>"
        yield _sandboxes(overview.sandboxes)
        lost = [view for view in overview.sandboxes if _state(view) == _LOST]
        if lost:
            lost.sort(key=lambda view: view.phases[-1].at_s, reverse=True)
            rows = [
                [_time(view.phases[-1].at_s), overview.name(view.key), view.phases[-1].reason]
                for view in lost[:MAX_LOST]
            ]
            more = f"<p>Only the last {len(rows)} of {len(lost)} are shown.</p>" if len(lost) > len(rows) else ""
            yield f"<h2>Lost sandboxes</h2>{more}"
            yield _table(["time (UTC)", "sandbox", "cause"], [map(escape, row) for row in rows])
    if overview.envs is not None and overview.sessions is not None:
        counts = Counter(one.task.env_id for one in overview.sessions)
        rows = [[spec.id, str(counts[spec.id]), spec.summary] for spec in overview.envs]
        yield "<h2>Environments</h2>"
        yield _table(["id", "sessions", ""], [map(escape, row) for row in rows])


def _sandboxes(views: Sequence[SandboxView]) -> str:
    own = Counter(_state(view) for view in views if view.key.is_own)  # environments run in them
    others = Counter(_state(view) for view in views if not view.key.is_own)
    rows = []
    for state, meaning in _STATES.items():
        kind = ' class="bad"' if state == _LOST and own[state] + others[state] else ""
        rows.append([f"<span{kind}>{state}</span>", str(others[state]), str(own[state]), meaning])
    return _table(["state", "sandboxes", "for environments", ""], rows)


def _state(view: SandboxView) -> str:
    """Return the name of a sandbox's state. "lost" becomes "finished" if the cause is that its command exited."""
    may_exit = view.spec.command and not view.key.is_own
    cause = view.phases[-1].cause
    if may_exit and view.state is SandboxState.LOST and cause is not None and cause.kind is CauseKind.EXITED:
        return _FINISHED
    return view.state.value


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table. Headings and cells are inserted as HTML, without escaping."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: str) -> str:
    return f'<td class="n">{cell}</td>' if cell.isdigit() else f"<td>{cell}</td>"
