"""The status page at ``/``, and the index at ``/v1``."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import anyio
import httpx

import envkit
from envkit import clock
from envkit.http.api.status_page import LINKS
from envkit.registry import EnvSpec
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.types import CauseKind, SandboxSpec
from tests.causes import cause
from tests.http.envs import serving, slots
from tests.http.guarded import Stage, on_stage
from tests.http.stage import over_http
from tests.sandbox.fake.backend import FakeBackend

COUNT = {"env_id": "Count-v0", "seed": 1}
EVIL = "<script>alert(1)</script>&\"'"
ENVS = [EnvSpec("Count-v0", lambda: None, summary=f"Counts {EVIL}")]


class Page(HTMLParser):
    """The tags, links and tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self._heading = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "h2":
            self._heading = ""
        elif tag == "table":
            self.tables[self._heading] = []
        elif tag == "tr":
            self.tables[self._heading].append([])
        elif tag in ("th", "td"):
            self.tables[self._heading][-1].append("")
        if tag in ("h2", "th", "td", "style"):
            self._in = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._in:
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "h2":
            self._heading += data
        elif self._in in ("th", "td"):
            self.tables[self._heading][-1][-1] += data
        if self._in != "style":
            self.text += data


async def page_of(client: httpx.AsyncClient, token: str | None = None, status: int = 200) -> Page:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = await client.get("/", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return Page(answer.text)


def test_the_page_shows_version_environments_sandboxes_by_state_and_lost_ones() -> None:
    async def main() -> None:
        async with (
            slots() as host,
            FakeBackend() as backend,
            Pool([Node("here", backend)]) as pool,
            serving(host, envs=lambda: ENVS, pool=pool) as address,
            httpx.AsyncClient(base_url=address, trust_env=False) as client,
        ):
            for name in ("a", "b", "c", ":envs-1"):
                await pool.create(name, SandboxSpec())
            backend.sandboxes[0].die(cause(EVIL))
            backend.sandboxes[3].die(cause("killed by signal 9"))
            await pool.create("done", SandboxSpec(command=("true",)))
            backend.sandboxes[4].die(cause("exited with code 0", CauseKind.EXITED))
            await client.put("/v1/sessions/x", json=COUNT)
            with anyio.fail_after(20):
                while any(pool.view(name).state.value != "lost" for name in ("a", ":envs-1", "done")):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            page = await page_of(client)
        assert f"envkit {envkit.__version__}" in page.text
        assert "Ready. 1 of 4 episode slots" in page.text
        states = {row[0]: row[1:3] for row in page.tables["Sandboxes"]}
        assert states["state"] == ["sandboxes", "for environments"]
        assert states["finished"] == ["1", "0"]
        assert (states["leased"], states["lost"], states["stopped"]) == (["2", "0"], ["1", "1"], ["0", "0"])
        assert {(row[1], row[2]) for row in page.tables["Lost sandboxes"][1:]} == {
            ("a", EVIL),
            (":envs-1", "killed by signal 9"),
        }
        assert page.tables["Environments"][1:] == [["Count-v0", "1", f"Counts {EVIL}"]]
        assert set(page.links) == set(LINKS)
        assert not {"script", "img", "link", "iframe", "form"} & set(page.tags)

    clock.run(main)


def test_without_a_needed_token_the_page_shows_only_version_and_links(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, other = stage.token("acme", "play,sandbox"), stage.token("other", "play,sandbox")
        admin, metrics = stage.token("ops", "admin"), stage.token("acme", "metrics")
        await stage.ask("PUT", "/v1/sandboxes/secret", acme, json={})
        await stage.ask("PUT", "/v1/sessions/x", acme, json=COUNT)
        bare = await page_of(stage.http, status=401)
        assert set(bare.tables) == {"Links"}
        assert set(bare.links) == set(LINKS)
        assert f"envkit {envkit.__version__}" in bare.text
        assert "episodes" not in bare.text
        leased = {}
        for name, token in (("acme", acme), ("other", other), ("admin", admin)):
            page = await page_of(stage.http, token)
            leased[name] = next(row[1] for row in page.tables["Sandboxes"] if row[0] == "leased")
        assert leased == {"acme": "1", "other": "0", "admin": "1"}
        assert set((await page_of(stage.http, metrics)).tables) == {"Links"}
        assert (await stage.ask("GET", "/", "ek_000000000000_" + "x" * 43)).status_code == 401

    on_stage(main, tmp_path, has_sandboxes=True)


def test_a_browser_opens_the_page_and_its_links_with_a_token_as_password(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        signed_in = httpx.BasicAuth("anybody", stage.token("ops", "admin"))
        asked = {path: await stage.ask("GET", path) for path in ("/", "/metrics", "/v1/sessions")}
        assert {path: answer.headers["www-authenticate"].split()[0] for path, answer in asked.items()} == {
            "/": "Basic",
            "/metrics": "Bearer",
            "/v1/sessions": "Bearer",
        }
        for path in ("/", *LINKS):
            assert (await stage.ask("GET", path, auth=signed_in)).status_code == 200
        # Nowhere else, because a browser would also send the password with requests of other sites' pages.
        assert (await stage.ask("GET", "/v1/sessions", auth=signed_in)).status_code == 401
        assert (await stage.ask("PUT", "/v1/sessions/x", auth=signed_in, json=COUNT)).status_code == 401
        for auth in (httpx.BasicAuth("", "ek_000000000000_" + "x" * 43), httpx.BasicAuth("", "")):
            refused = await stage.ask("GET", "/", auth=auth)
            assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        assert (await stage.ask("GET", "/", headers={"Authorization": "Basic ?"})).status_code == 401

    on_stage(main, tmp_path)


def test_each_path_in_the_index_of_the_protocol_answers() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        index = await client.get("/v1")
        assert (index.json()["version"], index.json()["protocol"]) == (envkit.__version__, 1)
        for path in index.json()["links"]:
            assert (await client.get(path)).status_code == 200

    over_http(main)
