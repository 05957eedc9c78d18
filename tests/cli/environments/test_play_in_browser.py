"""``envkit play --browser``: the server, its refusals, and an episode in Chromium."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gymnasium
import pytest

from envkit.cli.environments.browser import MAX_BODY_BYTES, GameServer
from envkit.cli.environments.game import Game
from envkit.errors import UsageError
from envkit.spaces import Utf8Text
from tests.environments.webshop.shop import LAMP, make_shop
from tests.programs.program import SCRIPT

TIMEOUT_S = 30


class Echo(gymnasium.Env[str, str]):
    """Repeats what it was sent, up to three times. A script in its page tries to change it."""

    observation_space = action_space = Utf8Text(1 << 23)
    render_mode = "html"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.actions: list[str] = []
        return f"level {seed}", {"legal_moves": ["<up>"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise KeyError("no such word")
        self.actions.append(action)
        return f"heard {action[:99]!r}", 0.25, len(self.actions) == 3, False, {"legal_moves": []}

    def render(self) -> Any:
        return "<title>page</title><p>page</p><script>document.querySelector('p').title = 'changed'</script>"


@contextmanager
def serving(env: gymnasium.Env[str, str], seed: int = 0) -> Iterator[GameServer]:
    with (
        closing(Game(env, "Echo-v0")) as game,
        GameServer(game, seed) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        serving = threads.submit(server.serve_forever, 0.05)
        try:
            yield server
        finally:
            server.shutdown()
            serving.result(TIMEOUT_S)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[GameServer]:
    with serving(echo) as server:
        yield server


def request(
    server: GameServer, path: str, fields: Mapping[str, str] | str | None = None, **headers: str
) -> tuple[int, str, str]:
    """Send a request, with `fields` a POST; return status, text and the header Location. {} is the token in `path`."""
    body = urlencode(fields) if isinstance(fields, Mapping) else fields
    sent = {"Host": server.hosts[0], "Content-Type": "application/x-www-form-urlencoded", **headers}
    with closing(http.client.HTTPConnection(*server.server_address[:2], timeout=TIMEOUT_S)) as connection:  # type: ignore[arg-type]
        connection.request("GET" if body is None else "POST", path.format(server.token), body, sent)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.getheader("Location", "").replace(server.token, "{}")


def seen(server: GameServer) -> str:
    """Return the observation that the page shows now."""
    status, page, _ = request(server, f"/{{}}/{server.number}/")
    assert status == 200
    found = re.search(r'<div id="text">(.*?)</div>', page, re.DOTALL)
    assert found is not None
    return unescape(found[1])


def test_an_action_changes_the_state_and_leads_to_its_address(server: GameServer) -> None:
    assert request(server, "/{}/") == (303, "", "/{}/0/")
    assert seen(server) == "level 0"
    assert request(server, "/{}/0/act", {"action": "<up> & é"}) == (303, "", "/{}/1/")
    assert seen(server) == "heard '<up> & é'"
    page = request(server, "/{}/1/")[1]
    assert "<dd id=reward>0.25</dd>" in page
    assert "<dd id=turns>1</dd>" in page


def test_a_query_replaces_its_place_in_the_action(server: GameServer, echo: Echo) -> None:
    request(server, "/{}/0/act", {"action": "search[{query}]", "query": "a {query} & b"})
    request(server, "/{}/1/act", {"action": "say[{query}]"})
    assert echo.actions == ["search[a {query} & b]", "say[{query}]"]


def test_a_form_of_an_earlier_state_changes_nothing(server: GameServer, echo: Echo) -> None:
    for _ in range(2):  # a double click, or a form that is posted again after going back
        assert request(server, "/{}/0/act", {"action": "once"}) == (303, "", "/{}/1/")
    assert request(server, "/{}/0/") == (303, "", "/{}/1/")
    assert request(server, "/{}/0/next", {"seed": "5"}) == (303, "", "/{}/1/")
    assert echo.actions == ["once"]


def test_after_the_end_only_the_next_episode_is_played(server: GameServer, echo: Echo) -> None:
    for turn in range(4):
        request(server, f"/{{}}/{turn}/act", {"action": str(turn)})
    assert echo.actions == ["0", "1", "2"]
    page = request(server, f"/{{}}/{server.number}/")[1]
    assert "The episode is over: over." in page
    assert "<fieldset disabled>" in page
    assert request(server, f"/{{}}/{server.number}/next", {"seed": "12"})[0] == 303
    assert seen(server) == "level 12"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", ""])
def test_another_host_name_is_refused(server: GameServer, echo: Echo, host: str) -> None:
    host = host.format(port=server.server_address[1])
    assert request(server, "/{}/0/", Host=host)[0] == 403
    assert request(server, "/{}/0/act", {"action": "x"}, Host=host)[0] == 403
    assert echo.actions == []


def test_localhost_is_the_same_host(server: GameServer) -> None:
    assert request(server, "/{}/0/", Host=server.hosts[1])[0] == 200


@pytest.mark.parametrize("path", ["/x/", "/x/0/", "/{}x/0/act", "/x/0/next"])
def test_a_wrong_token_is_refused_and_gives_nothing_away(server: GameServer, echo: Echo, path: str) -> None:
    status, text, _ = request(server, path, {"action": "x"} if path[-1] != "/" else None)
    assert (status, text) == (403, "wrong token; open the address that envkit play printed\n")
    assert echo.actions == []


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/{}", "/{}/0", "/{}/0/act", "/{}/-1/", "/{}/0/../0/"])
def test_an_unknown_path_is_not_found(server: GameServer, path: str) -> None:
    assert request(server, path)[0] == 404


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("act", "", "action: missing"),
        ("act", "query=x", "action: missing"),
        ("act", "&".join(f"a{n}=1" for n in range(20)), "Max number of fields exceeded"),
        ("next", "seed=-1", "seed: must be a number of at most 18 digits, got '-1'"),
        ("next", "seed=" + "9" * 19, "seed: must be a number of at most 18 digits, got '9999999999999999999'"),
        ("next", "action=x", "seed: must be a number of at most 18 digits, got ''"),
    ],
)
def test_an_incomplete_form_is_refused(server: GameServer, name: str, body: str, reason: str) -> None:
    assert request(server, f"/{{}}/0/{name}", body) == (400, f"{reason}\n", "")
    assert (server.number, seen(server)) == (0, "level 0")


def test_an_action_of_1_mb_of_any_bytes_is_played(server: GameServer, echo: Echo) -> None:
    assert request(server, "/{}/0/act", {"action": "x" * 1_000_000})[0] == 303
    assert request(server, "/{}/1/act", "action=%ff%00" + "%5B" * 300_000)[0] == 303
    assert echo.actions == ["x" * 1_000_000, "�\0" + "[" * 300_000]


@pytest.mark.parametrize(
    ("length", "status"), [(str(MAX_BODY_BYTES + 1), 413), ("-1", 411), ("", 411), ("9" * 99, 411)]
)
def test_a_form_of_a_wrong_size_is_refused_before_it_is_read(server: GameServer, length: str, status: int) -> None:
    assert request(server, "/{}/0/act", "", **{"Content-Length": length})[0] == status


def test_an_environment_that_raises_is_an_answer_and_the_next_episode_is_played(server: GameServer) -> None:
    status, text, _ = request(server, "/{}/0/act", {"action": "crash"})
    assert status == 500
    assert text.startswith("Echo-v0 raised KeyError in step: 'no such word'")
    assert request(server, "/{}/0/next", {"seed": "3"})[0] == 303
    assert seen(server) == "level 3"


def test_no_other_site_can_frame_the_page_or_see_its_address(server: GameServer) -> None:
    with closing(http.client.HTTPConnection(*server.server_address[:2], timeout=TIMEOUT_S)) as connection:  # type: ignore[arg-type]
        connection.request("GET", f"/{server.token}/0/")
        headers = connection.getresponse().headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")


def test_a_port_that_is_taken_is_named(server: GameServer, echo: Echo) -> None:
    port = server.server_address[1]
    with (
        closing(Game(echo, "Echo-v0")) as game,
        pytest.raises(UsageError, match=f"--port {port}: Address already in use; choose another port, or leave it out"),
    ):
        GameServer(game, 0, port=port)


def test_control_c_ends_the_server_as_it_ends_other_games(frail: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, "play", "Frail-v0", "--browser", "--no-open"],
        env={**os.environ, "PYTHONPATH": str(frail)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"playing at http://127\.0\.0\.1:(\d+)(/[\w-]{22}/) \(Ctrl-C quits\)\n", line)
        assert found is not None, line
        with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=TIMEOUT_S)) as connection:
            connection.request("GET", f"{found[2]}0/")
            assert 'srcdoc="&lt;p&gt;page"' in connection.getresponse().read().decode()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=TIMEOUT_S) == ("", "")
    assert process.returncode == 130


@pytest.mark.chromium
@pytest.mark.slow
def test_in_chromium_a_shopper_clicks_from_the_search_to_the_purchase(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    env = make_shop(tmp_path, observation="text", instructions=False)
    with serving(env, seed=2) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page()
        shop = page.frame_locator("iframe")
        page.goto(server.url)

        def check(number: int) -> None:
            page.wait_for_url(f"{server.url}{number}/")  # waits for the frame too
            texts = shop.locator("form :not(:has(*), input)").all_text_contents()
            assert " [SEP] ".join(text.strip() for text in texts) == page.locator("#text").text_content()

        def click(label: str) -> None:
            shop.get_by_role("button", name=label, exact=True).click()

        check(0)
        shop.locator("input").fill("desk lamps")
        shop.locator("input").press("Enter")
        check(1)
        for number, label in enumerate((LAMP.asin, 'oak | "natural"', "black", "large", "Features", "< Prev"), 2):
            click(label)
            check(number)
        assert shop.locator("[aria-pressed]").all_text_contents() == ["black", "large"]
        page.go_back()
        page.reload()
        check(7)
        click("Buy Now")
        check(8)
        assert page.locator("dd").all_text_contents() == ["2", "8", "1", "1"]
        assert page.locator(".end").text_content() == "The episode is over: solved."
        page.get_by_role("button", name="Next episode").click()
        check(9)
        assert page.locator("dd").all_text_contents() == ["3", "0", "–", "0"]
        browser.close()


@pytest.mark.chromium
@pytest.mark.slow
def test_in_chromium_a_script_in_the_page_of_an_environment_does_not_run(server: GameServer) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page()
        page.goto(server.url)
        assert page.frame_locator("iframe").locator("p").get_attribute("title") is None
        elsewhere = browser.new_page()
        elsewhere.set_content(Echo().render())
        assert elsewhere.locator("p").get_attribute("title") == "changed"
        browser.close()
