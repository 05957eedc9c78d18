"""A judge model behind an endpoint with OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from envkit.errors import UnreachableError
from envkit.wiring.evaluation.endpoint import API_KEY, Address, Endpoint, open_endpoint
from envkit.wiring.evaluation.players import NoCompletionError, Playing


@dataclass(frozen=True, slots=True)
class EndpointJudge:
    """A judge that asks an endpoint, greedily; see `envkit.protocols.Judge`."""

    endpoint: Endpoint

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        playing = replace(self.endpoint.playing, turn_tokens=max_tokens)
        try:
            reply = await replace(self.endpoint, playing=playing).complete([dict(one) for one in messages], seed=0)
        except NoCompletionError as error:
            raise UnreachableError(str(error)) from error
        return reply.choices[0].message.content or ""


@asynccontextmanager
async def open_judge(address: str) -> AsyncIterator[EndpointJudge]:
    """Open the judge at `address`, ``MODEL@URL``, with the API key in ``OPENAI_API_KEY``.

    Raises:
        UsageError: The address is not valid.
    """
    playing = Playing(temperature=0.0)
    async with open_endpoint(Address.of(address), playing, api_key=os.environ.get(API_KEY)) as endpoint:
        yield EndpointJudge(endpoint)
