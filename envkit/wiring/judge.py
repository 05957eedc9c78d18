"""A judge model behind an endpoint with OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from envkit.errors import TooLargeError, UnreachableError
from envkit.http.client.chat import API_KEY, Address, ChatClient, NoReplyError, RequestRefusedError, open_client
from envkit.trainer_bridge.thoughts import without_thoughts


@dataclass(frozen=True, slots=True)
class EndpointJudge:
    """A judge that asks an endpoint, greedily; see `envkit.protocols.Judge`."""

    client: ChatClient

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        try:
            reply = await self.client.complete(messages, max_tokens=max_tokens, temperature=0.0, seed=0)
        except NoReplyError as error:
            raise UnreachableError(str(error)) from error
        except RequestRefusedError as error:
            raise TooLargeError(f"the judge {self.client.address.model} refuses the chat: {error}") from error
        return without_thoughts(reply.choices[0].message.content or "")


@asynccontextmanager
async def open_judge(address: str | Address) -> AsyncIterator[EndpointJudge]:
    """Open the judge at `address`, which may be text, ``MODEL@URL``, with the API key in ``OPENAI_API_KEY``.

    Raises:
        UsageError: The address is not valid.
    """
    server = address if isinstance(address, Address) else Address.of(address, "env.judge", prefix="")
    async with open_client(server, api_key=os.environ.get(API_KEY)) as client:
        yield EndpointJudge(client)
