"""An agent program as a proxy sees it: requests over HTTP, one after another or several at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]

CHAT, RESPONSES, MESSAGES = ROUTES = ("chat/completions", "responses", "messages")
TIMEOUT_S = 60.0
MAX_TOKENS = 16
"""Limit of the answers, unless a request has another one; the smallest that OpenAI's Responses API accepts."""

_BODIES: Mapping[str, Callable[[list[Json]], Json]] = {
    CHAT: lambda messages: {"max_tokens": MAX_TOKENS, "messages": messages},
    RESPONSES: lambda messages: {"max_output_tokens": MAX_TOKENS, "input": messages},
    MESSAGES: lambda messages: {"max_tokens": MAX_TOKENS, "messages": messages},
}
_TEXTS: Mapping[str, Callable[[Json], str]] = {
    CHAT: lambda body: body["choices"][0]["message"]["content"] or "",
    RESPONSES: lambda body: "".join(
        part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
    ),
    MESSAGES: lambda body: "".join(block["text"] for block in body["content"] if block["type"] == "text"),
}
_DELTAS: Mapping[str, Callable[[Json], str]] = {
    CHAT: lambda event: "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())),
    RESPONSES: lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    MESSAGES: lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: object) -> Json:
    return {"role": "user", "content": text}


def assistant(text: object, **fields: object) -> Json:
    return {"role": "assistant", "content": text, **fields}


class Exchange:
    """A request that has been sent, and its response, which is read when it is asked for.

    Args:
        url: The whole URL.
        content: The body; an iterator of bytes is sent in chunks.
    """

    def __init__(
        self, url: str, content: bytes | Iterator[bytes] | None, method: str, headers: Mapping[str, str]
    ) -> None:
        parts = urlsplit(url)
        self.path = parts.path or "/"
        self._route = next((route for route in ROUTES if parts.path.endswith(route)), CHAT)
        made = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.connection = made(parts.netloc, timeout=TIMEOUT_S)
        self.connection.request(method, self.path, content, {"content-type": "application/json", **headers})

    @cached_property
    def response(self) -> HTTPResponse:
        return self.connection.getresponse()

    @property
    def status(self) -> int:
        return self.response.status

    @cached_property
    def content(self) -> bytes:
        """The whole body of the response."""
        return self.response.read()

    @cached_property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> Json:
        found: Json = self.json["error"]
        return found

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a stream as they come."""
        while line := self.response.readline():
            yield line

    def events(self) -> Iterator[Json]:
        """Yield the events of a stream as they come."""
        for line in self.lines() if "content" not in self.__dict__ else self.content.splitlines():
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)

    def pieces(self) -> Iterator[str]:
        """Yield the pieces of the answer's text that a stream has, as they come."""
        yield from filter(None, map(_DELTAS[self._route], self.events()))

    @property
    def text(self) -> str:
        """The text of an answer in one piece."""
        assert self.status == 200, self.content
        return _TEXTS[self._route](self.json)

    @property
    def message(self) -> Json:
        """The assistant's message of a chat completion, as clients send it back."""
        found: Json = self.json["choices"][0]["message"]
        return found

    @property
    def id(self) -> str:
        """Id of the answer. A fresh answer has another one."""
        assert self.status == 200, self.content
        return str(self.json["id"])

    def close(self) -> None:
        """Close the connection, also before the end of the response."""
        if "response" in self.__dict__:
            self.response.close()
        self.connection.close()


class Client:
    """Sends the requests of one episode.

    Attributes:
        url: The base URL as OpenAI's clients take it, without a slash at its end.
        model: Name of the model in requests that name no other one.
        headers: Headers of each request.
    """

    model = "gpt"
    headers: Mapping[str, str] = {}

    def __init__(self, url: str) -> None:
        self.url = url
        self._exchanges: list[Exchange] = []

    def send(
        self,
        route: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> Exchange:
        """Send a request, and do not wait for the response."""
        content: Any = json.dumps(body).encode() if isinstance(body, dict) else body
        sent = Exchange(
            f"{self.url if url is None else url}/{route}", content, method, {**self.headers, **(headers or {})}
        )
        self._exchanges.append(sent)
        return sent

    def begin(self, *messages: Json, route: Any = CHAT, headers: Any = None, **fields: Any) -> Exchange:
        """Ask the policy, and do not wait for the answer."""
        body = _BODIES[route.removesuffix("/count_tokens")]([*messages])
        return self.send(route, {"model": self.model, **body, **fields}, headers=headers)

    def ask(self, *messages: Json, route: Any = CHAT, headers: Any = None, **fields: Any) -> Exchange:
        """Ask the policy, and receive the whole response."""
        asked = self.begin(*messages, route=route, headers=headers, **fields)
        assert asked.content is not None
        return asked

    def close(self) -> None:
        """Close all connections."""
        for one in self._exchanges:
            one.close()
