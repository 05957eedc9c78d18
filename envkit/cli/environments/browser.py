"""Plays a game in a browser: a web server on the loopback interface shows the page, and what a policy sees.

Other sites cannot play: each request needs the secret token in its path, and a host name of this machine. Each state of
the game has an address of its own, and an action posted to the address of an earlier state changes nothing. Going back,
reloading and double clicks thus repeat no action.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import webbrowser
from collections.abc import Mapping
from html import escape
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from urllib.parse import parse_qs

from envkit.cli.environments.game import Game
from envkit.cli.tables import echo
from envkit.errors import EnvkitError, UsageError

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a posted form."""
_IDLE_S = 30
"""Seconds after which a connection without a request is closed. Browsers open some in advance."""

_PATH = re.compile(r"/([\w-]{1,64})/(?:([0-9]{1,9})/(act|next)?)?", re.ASCII)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d0d7de, #3a414a); --muted: light-dark(#5b6673, #9aa5b1) }
* { box-sizing: border-box }
body { margin: 0; height: 100vh; display: grid; grid-template-columns: minmax(0, 3fr) minmax(20rem, 2fr);
  font: 14px/1.45 system-ui, sans-serif; background: light-dark(#fff, #0e1013); color: light-dark(#1b2127, #e4e8ec) }
iframe { width: 100%; height: 100%; border: 0; border-right: 1px solid var(--line) }
aside { overflow: auto; padding: 1rem; display: grid; gap: .75rem; align-content: start }
h1, h2, dl, dd, p { margin: 0 } h1 { font-size: 1.1rem } h2 { font-size: .85rem; color: var(--muted) }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem } dl div { display: flex; gap: .4rem }
dt { color: var(--muted) } dd, .end { font-weight: 600 }
#text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 45vh; overflow: auto; padding: .75rem;
  border: 1px solid var(--line); border-radius: 6px; font: 12.5px/1.5 ui-monospace, monospace }
form, fieldset { margin: 0; padding: 0; border: 0; display: flex; flex-wrap: wrap; gap: .4rem; align-items: center;
  min-width: 0 } fieldset { flex: 1 }
button, input { font: inherit; padding: .25rem .6rem; border: 1px solid var(--line); border-radius: 6px; color: inherit;
  background: light-dark(#f6f8fa, #1d2127); max-width: 100%; overflow-wrap: anywhere; text-align: left }
button { cursor: pointer } button:disabled { opacity: .5; cursor: default } input[name=action] { flex: 1 }
input[type=number] { width: 8rem }
@media (max-width: 60rem) { body { height: auto; grid-template-columns: 1fr } iframe { height: 70vh } }
"""


def play_in_browser(game: Game, seed: int, *, port: int, is_opened: bool) -> None:
    """Serve a game whose drawings are HTML documents on 127.0.0.1, until Ctrl-C. `port` 0 is any free port.

    If `is_opened` is true and there is a display, the user's browser opens the address. Raises `UsageError` if the
    environment has no pages, or the port is not available.
    """
    with GameServer(game, seed, port=port) as server:
        echo(f"playing at {server.url} (Ctrl-C quits)")
        sys.stdout.flush()
        has_display = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
        if is_opened and has_display:
            webbrowser.open(server.url)
        server.serve_forever()


class GameServer(ThreadingTCPServer):
    """A web server on 127.0.0.1 with one game, which all its visitors play.

    Attributes:
        token: The secret part of the address.
        number: Number of the state that is shown; it grows with each action.
        lock: Held while a state is read or changed.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, game: Game, seed: int, *, port: int = 0) -> None:
        if game.begin(seed).drawing is None:
            raise UsageError(f"--browser: {game.env_id} has no render mode 'html'; leave --browser out")
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; choose another port, or leave it out") from None
        self.game = game
        self.token = secrets.token_urlsafe(16)
        self.number = 0
        self.lock = Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the header Host that are accepted."""
        return tuple(f"{name}:{self.server_address[1]}" for name in ("127.0.0.1", "localhost"))

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}/{self.token}/"

    def act(self, name: str, fields: Mapping[str, str]) -> None:
        """Play the action of a posted form, or with the name ``next`` begin the level of the field ``seed``.

        Raises `ValueError` if a field is missing or invalid.
        """
        if name == "next":
            seed = fields.get("seed", "")
            if not re.fullmatch("[0-9]{1,18}", seed):
                raise ValueError(f"seed: must be a number of at most 18 digits, got {seed[:80]!r}")
            self.game.begin(int(seed))
        elif "action" not in fields:
            raise ValueError("action: missing")
        elif self.game.scene.end is None:
            action = fields["action"]
            if "query" in fields:
                action = action.replace("{query}", fields["query"])
            self.game.act(self.game.answer(action))
        self.number += 1

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of an exception, unless a browser closed its connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._handle(is_post=False)

    def do_POST(self) -> None:
        self._handle(is_post=True)

    def log_message(self, format: str, *args: object) -> None:
        """Do not print requests."""

    def _handle(self, *, is_post: bool) -> None:
        server = self.server
        assert isinstance(server, GameServer), "it creates its handlers"
        try:
            number, name = self._checked_path(server, is_post=is_post)
            fields = self._form() if is_post else {}
            with server.lock:
                is_now = number == server.number
                if is_post and is_now:
                    server.act(name, fields)
                page = _page(server.game) if is_now and not is_post else None
        except (_RefusedError, ValueError, EnvkitError) as error:
            status = error.status if isinstance(error, _RefusedError) else 400 if isinstance(error, ValueError) else 500
            self._send(status, f"{error}\n", kind="plain")
            return
        if page is None:
            self._send(303, "", Location=f"/{server.token}/{server.number}/")
        else:
            self._send(200, page)

    def _checked_path(self, server: GameServer, *, is_post: bool) -> tuple[int | None, str]:
        """Return the number of the state and the name of the form in the path."""
        if self.headers.get_all("Host") not in [[host] for host in server.hosts]:
            raise _RefusedError(403, f"unknown host; open the address at {server.hosts[0]}")
        path = _PATH.fullmatch(self.path)
        if path is None or is_post != (path[3] is not None):
            raise _RefusedError(404, "no such page")
        if not secrets.compare_digest(path[1], server.token):
            raise _RefusedError(403, "wrong token; open the address that envkit play printed")
        return int(path[2]) if path[2] else None, path[3] or ""

    def _form(self) -> Mapping[str, str]:
        """Read the fields of the posted form."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise _RefusedError(411, "the header Content-Length is missing or invalid")
        if int(length) > MAX_BODY_BYTES:
            raise _RefusedError(413, f"form too large ({length} bytes, limit {MAX_BODY_BYTES})")
        body = self.rfile.read(int(length)).decode(errors="replace")
        fields = parse_qs(body, keep_blank_values=True, max_num_fields=9)
        return {name: values[-1] for name, values in fields.items()}

    def _send(self, status: int, text: str, *, kind: str = "html", **headers: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _page(game: Game) -> str:
    """Return the document with the environment's page, and what a policy sees."""
    scene = game.scene
    facts = {
        "seed": scene.seed,
        "turns": scene.turns,
        "reward": "–" if scene.reward is None else f"{scene.reward:g}",
        "return": f"{scene.total:g}",
    }
    shown = "".join(f"<div><dt>{name}</dt><dd id={name}>{value}</dd></div>" for name, value in facts.items())
    moves = "".join(
        f'<button name="action" value="{escape(move)}">{escape(move)}</button>' for move in scene.legal_moves
    )
    state = " disabled" if scene.end else ""
    # The frame is sandboxed, because the document comes from the environment: no scripts, and no access to this page.
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(game.env_id)}</title><style>{_STYLE}</style></head><body>
<iframe title="Page" sandbox="allow-forms allow-top-navigation-by-user-activation"
 srcdoc="{escape(scene.drawing or "")}"></iframe>
<aside><h1>{escape(game.env_id)}</h1><dl>{shown}</dl>
{f'<p class="end">The episode is over: {scene.end}.</p>' if scene.end else ""}
<form method="post" action="next"><label>Seed <input type="number" name="seed" min="0" value="{scene.seed + 1}"
 required></label><button>Next episode</button></form>
<h2>Observation</h2><div id="text">{escape(scene.text)}</div>
<h2>Answer</h2><form method="post" action="act"><fieldset{state}><input name="action"
 aria-label="Answer" autocomplete="off" required><button>Send</button></fieldset></form>
{f'<h2>Legal moves</h2><form method="post" action="act"><fieldset{state}>{moves}</fieldset></form>' if moves else ""}
</aside></body></html>
"""
