"""One replica of the engine: a server that was started here or elsewhere, and its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from envkit.types import Weights

from .client import ServerLostError, VllmClient
from .server import VllmServer

START_TIMEOUT_S = 600.0
_POLL_S = 1.0
_FIRST_S = 60.0
"""Maximum seconds to wait for a server that was started elsewhere, when a run begins."""
_EXIT_S = 6.0
"""A server whose engine process was killed ends by itself within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of the engine.

    Attributes:
        max_tokens: Maximum length of a prompt and its completion in tokens.
        max_num_seqs: Maximum number of completions in progress per replica.
        takes_adapters: Whether weights are LoRA adapters.
        start_timeout_s: Maximum seconds until a server answers, at the start and after a loss.
        stall_timeout_s: Maximum seconds without a token; then a server is lost.
        seeds: Whether requests have seeds; vLLM then samples row by row.
        shares_files: Whether all servers see the files of weights at the paths that they have here.
        weights_url: URL at which all servers fetch weights; None: those on other machines find this one by its address.
    """

    max_tokens: int
    max_num_seqs: int
    dtype: str
    model: str = "model"
    takes_adapters: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    stall_timeout_s: float = 120.0
    max_restarts: int = 3
    seeds: bool = False
    shares_files: bool = False
    weights_url: str | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """A replica.

    Attributes:
        index: Index in the engine.
        server: The server to start; None if it was started elsewhere.
        url: Address of the server.
        is_ready: Whether requests may be sent: the server answers and has the current weights.
        is_draining: Whether it gets no new requests.
        frozen: The weights that it keeps, whatever is loaded; see `VllmEngine.frozen`.
        is_gone: Whether it will not come back.
        running: Number of requests in progress.
        fetched: The weights whose files its server has fetched last.
        fetched_path: Path of these files on the server's machine.
        restarts: Number of times that it was lost.
        loss: Why it was lost; empty while it is not.
    """

    index: int
    server: VllmServer | None
    url: str = ""
    is_ready: bool = False
    is_draining: bool = False
    frozen: Weights | None = None
    is_gone: bool = False
    running: int = 0
    version: int = 0
    fetched: Weights | None = None
    fetched_path: str = ""
    restarts: int = 0
    loss: str = ""
    _lost: anyio.Event = field(default_factory=anyio.Event)
    _client: VllmClient | None = None

    @property
    def client(self) -> VllmClient:
        """Calls the server; exists after `start`."""
        assert self._client is not None
        return self._client

    def lose(self, error: ServerLostError) -> None:
        """Send no more requests to the server, until it is back."""
        self.is_ready, self.loss = False, str(error)
        self._lost.set()

    def is_back(self) -> None:
        """The server answers, and has the current weights."""
        self.is_ready, self.loss = True, ""
        self._lost = anyio.Event()

    async def start(self, settings: VllmSettings, announce: Callable[[str], None]) -> None:
        """Start the server, or wait until the one that was started elsewhere answers; `announce` the wait.

        Raises:
            UsageError: The server cannot be started.
            ServerLostError: The server does not answer.
        """
        if self.server is not None:
            await self.server.stop()  # the place must be free
            await self.server.start(settings.start_timeout_s)
            self.url = self.server.url
        self._client = VllmClient(self.url, stall_timeout_s=settings.stall_timeout_s)
        self.fetched = None
        # If the server has never answered, the address is probably wrong.
        timeout_s = settings.start_timeout_s if self.restarts else min(settings.start_timeout_s, _FIRST_S)
        with anyio.move_on_after(timeout_s):
            if await self.client.is_healthy():
                return
            announce(f"waiting for the vLLM server {self.url}")
            while True:
                await anyio.sleep(_POLL_S)
                if await self.client.is_healthy():
                    return
        raise ServerLostError(f"no answer within {timeout_s:g} s; start it with `envkit vllm`, or change engine.url")

    async def wait_lost(self) -> str:
        """Wait until the server is lost; if it was started here, end its process. Return why it was lost."""
        server, reason = self.server, ""
        if server is None:
            await self._lost.wait()
            return self.loss

        async def ended() -> None:
            nonlocal reason
            reason = await server.wait_ended()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ended)
            await self._lost.wait()
            await anyio.sleep(_EXIT_S)
            await server.kill()
        return f"{self.loss} (the process: {reason})" if self.loss and reason else reason or self.loss

    async def close(self) -> None:
        """Close the connections, which ends all requests in progress here."""
        self.is_ready = False
        if self._client is not None:
            await self._client.close()

    async def stop(self) -> None:
        """Close the connections, and end the server if it was started here."""
        await self.close()
        if self.server is not None:
            await self.server.stop()
