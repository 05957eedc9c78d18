"""The vLLM engine: completes prompts on one or more vLLM servers, and outlives the loss of a server.

Each request is streamed, so the tokens that arrived are kept if its server is lost. There is one way to continue a
completion: the prompt and the tokens so far are sent as a new request for the rest. This is used after a pause that
keeps completions, an aborted call, a lost server, and a drained one. All tokens of a request come from one version.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SessionConflictError, UsageError
from envkit.protocols import Engine
from envkit.types import Completion, EngineHealth, PauseMode, SamplingParams, Weights

from ...weights.served import WeightServer, is_this_machine
from .client import UNKNOWN, Part, ServerLostError
from .replica import Replica, VllmSettings
from .request import Request
from .routing import Routing
from .server import VllmServer

_ABORT_EVERY_S = 0.1
"""An abort is repeated this often, because it has no effect on a request that the server does not know yet."""


@dataclass(frozen=True, slots=True)
class _PinnedEngine:
    """An `envkit.protocols.Engine` whose requests all go to one replica."""

    repeats: bool
    generate: Callable[..., Coroutine[Any, Any, Completion]]
    abort: Callable[..., Coroutine[Any, Any, None]]
    forget: Callable[..., None]


class VllmEngine:
    """Generates text with vLLM servers.

    It implements `envkit.protocols.FetchingEngine` and `FreezableEngine`. Open it with `running`. It has a replica for
    each of `servers`, which it starts, and starts again after a loss, and for each of `urls`, those of running servers.
    `announce` shows a line to the user.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        servers: Sequence[VllmServer] = (),
        urls: Sequence[str] = (),
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        parts = [*((server, "") for server in servers), *((None, url) for url in urls)]
        self._settings = settings
        self._announce = announce
        self._replicas = [Replica(index, server, url) for index, (server, url) in enumerate(parts)]
        self._routing = Routing()
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._changed = anyio.Event()
        self._loading = anyio.Lock()
        self._pause: PauseMode | None = None
        self._current: Weights | None = None
        self._version = 0
        self._weight_server: WeightServer | None = None
        self._failure: EnvkitError | None = None

    @property
    def repeats(self) -> bool:
        """False: batches depend on when requests arrive, and the last digits of results depend on batches."""
        return False

    @property
    def description(self) -> str:
        """Model, number of servers and number format, in one line."""
        count = len(self._replicas)
        return f"{self._settings.model} on {count} vLLM server{'s' if count > 1 else ''} in {self._settings.dtype}"

    @property
    def dtype(self) -> str:
        """Number format of the weights, such as ``"bfloat16"``."""
        return self._settings.dtype

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` takes LoRA adapters instead of all weights."""
        return self._settings.takes_adapters

    @property
    def urls(self) -> Sequence[str]:
        """Addresses of the servers. A server that is started again may have another one."""
        return [replica.url for replica in self._replicas]

    async def changed(self) -> None:
        """Wait until a server or a request has changed; raise an `EnvkitError` if no server is left."""
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Start or connect the servers, and watch them until the end of the block; then end those started here.

        Raises:
            UsageError: A server cannot be started, does not answer, or was not started for envkit.
        """
        async with clock.background_tasks() as tasks:
            try:
                await self._start()
                for replica in self._replicas:
                    tasks.start_soon(self._keep, replica)
                yield self
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._stop()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        """See `envkit.protocols.Engine.generate`.

        Raises:
            UsageError: The server rejected the request, or `params` has top-p or top-k, which would change the
                log-probabilities that vLLM returns.
            EnvkitError: No server is left, or one has other weights than the engine has loaded.
        """
        return await self._generate(None, prompt_ids, params, session=session, so_far=so_far)

    async def _generate(
        self,
        pinned: Replica | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        if params.top_p < 1 or params.top_k > 0:
            raise UsageError("the engine vllm supports neither top_p nor top_k; use 1 and 0")
        if any(one.session == session is not None and not one.is_aborted for one in self._requests.values()):
            raise SessionConflictError(
                f"session {session}: a completion is in progress; wait for it, or use another session"
            )
        # Other engines may use the same server, so the id has the process id.
        name = f"{os.getpid()}-{id(self):x}-{next(self._numbers)}"
        request = Request(params, so_far, id=name, prompt=[*prompt_ids], session=session, pinned=pinned)
        self._requests[name] = request
        try:
            while (finish := request.finish) is None:
                if (replica := await self._replica_for(request)) is not None:
                    await self._add_part(request, replica)
            return request.completion(finish)
        finally:
            del self._requests[name]
            self._notify()

    async def abort(self, session: str) -> None:
        """See `envkit.protocols.Engine.abort`."""
        chosen = [one for one in self._requests.values() if one.session == session]
        for request in chosen:
            request.is_aborted = True
        self._notify()
        await self._end(chosen)

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """See `envkit.protocols.Engine.pause`."""
        self._pause = mode
        present = [request for request in self._requests.values() if not request.is_frozen]
        if mode is PauseMode.ABORT:
            for request in present:
                request.is_aborted = True
            self._notify()
        if mode is not PauseMode.WAIT:
            await self._end(present)
        while any(request.replica is not None and not request.is_frozen for request in self._requests.values()):
            await self._changed.wait()

    async def resume(self) -> None:
        """See `envkit.protocols.Engine.resume`."""
        self._pause = None
        self._notify()

    async def health(self) -> EngineHealth:
        """See `envkit.protocols.Engine.health`."""
        if self._failure is not None:
            raise self._failure
        fed: list[int] = []

        async def count(replica: Replica) -> None:
            fed.append(await replica.client.fed_tokens())

        await self._on_each(self._ready(), count)
        running = sum(replica.running for replica in self._replicas)
        return EngineHealth(self._version, running, len(self._requests) - running, self._pause is not None, sum(fed))

    def forget(self, session: str) -> None:
        """See `envkit.protocols.Engine.forget`. The servers drop cached tokens when they need the memory."""
        self._routing.forget(session)

    async def fetch(self, weights: Weights) -> None:
        """Let the servers on other machines that see no files of this one fetch new weights, while they generate.

        A replica that is lost meanwhile fetches the weights when it loads them.

        Raises:
            UsageError: A server cannot fetch the weights.
        """
        async with self._loading:
            await self._on_each(self._thawed(), lambda replica: self._fetched(replica, weights))

    async def load(self, weights: Weights) -> None:
        """Load new weights on all replicas but a frozen one.

        Without `pause`, wait for the completions that are being generated.

        A replica that is lost meanwhile loads the weights when it is back.

        Raises:
            UsageError: A server cannot load the weights.
            ValueError: The weights have no location, or are an adapter and the engine takes all weights, or vice versa.
        """
        if not weights.location or weights.adapter != self._settings.takes_adapters:
            expected = "a LoRA adapter" if self._settings.takes_adapters else "all weights"
            raise ValueError(f"the engine vllm loads {expected} from a file, got {weights}")
        is_paused = self._pause is not None
        try:
            if not is_paused:
                await self.pause(PauseMode.WAIT)
            async with self._loading:
                await self._on_each(self._thawed(), lambda replica: self._install(replica, weights))
                self._current, self._version = weights, weights.version
        finally:
            if not is_paused:
                await self.resume()

    # --- Replicas ----------------------------------------------------------------------------------------------------

    @property
    def completers(self) -> Mapping[int, Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]]:
        """For each ready replica with the current weights, by index, a function that completes a prompt there."""
        return {one.index: partial(self._generate, one) for one in self._thawed()}

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Engine | None]:
        """See `envkit.protocols.FreezableEngine.frozen`.

        It is the least busy replica, if two are ready. It is drained meanwhile; then it loads the current weights.
        """
        ready = [one for one in self._ready() if not one.is_draining]
        if len(ready) < 2 or self._current is None:
            yield None
            return
        replica = min(ready, key=lambda one: one.running)
        replica.frozen = self._current
        try:
            await self.drain(replica.index)
            yield _PinnedEngine(self.repeats, partial(self._generate, replica), self.abort, self.forget)
        finally:
            with anyio.CancelScope(shield=True):
                async with self._loading:
                    current = self._current
                    try:
                        if replica.is_ready and current is not replica.frozen:
                            await self._on_each([replica], lambda one: self._install(one, current))
                    finally:
                        replica.frozen = None
                        self.admit(replica.index)

    async def drain(self, index: int) -> None:
        """Send no more requests to a replica; those in progress there continue on others. Returns when it is idle."""
        replica = self._replicas[index]
        replica.is_draining = True
        await self._end([one for one in self._requests.values() if one.replica is replica])

    def admit(self, index: int) -> None:
        """Send requests to a drained replica again."""
        self._replicas[index].is_draining = False
        self._notify()

    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.is_ready]

    def _thawed(self) -> list[Replica]:
        return [replica for replica in self._ready() if replica.frozen is None]

    async def _start(self) -> None:
        """Start all servers at the same time; the first that cannot start ends the others."""
        errors: list[EnvkitError] = []

        async def start(replica: Replica) -> None:
            try:
                await self._join(replica)
            except ServerLostError as error:
                errors.append(UsageError(f"the vLLM server {replica.url} does not answer: {error}"))
            except EnvkitError as error:
                errors.append(error)
            if errors:
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for replica in self._replicas:
                tasks.start_soon(start, replica)
        if errors:
            raise errors[0]

    async def _join(self, replica: Replica) -> None:
        """Start or await the server of a replica, and give it the current weights."""
        await replica.start(self._settings, self._announce)
        async with self._loading:
            settings = self._settings
            if replica.server is None and not replica.restarts and await replica.client.is_busy():
                raise UsageError(f"another run uses the vLLM server {replica.url}; give each run its own servers")
            await replica.client.connect(
                max_tokens=settings.max_tokens, dtype=settings.dtype, takes_adapters=settings.takes_adapters
            )
            replica.version = 0
            if (weights := replica.frozen or self._current) is not None:
                await self._install(replica, weights)
            replica.is_back()
        self._notify()

    async def _keep(self, replica: Replica) -> None:
        """Bring a replica back whenever it is lost, as often as the settings allow."""
        while True:
            reason = await replica.wait_lost()
            await replica.close()
            self._routing.clear(replica.index)
            while not replica.is_ready:
                self._notify()
                is_last = replica.restarts == self._settings.max_restarts
                waits = "waiting for it to return" if replica.server is None else "starting it again"
                follows = "; it is not started again" if is_last else f"; {waits}"
                self._announce(f"lost the vLLM server {replica.index} at {replica.url}: {reason}{follows}")
                if is_last:
                    self._give_up(replica, reason)
                    return
                replica.restarts += 1
                try:
                    await self._join(replica)
                except (ServerLostError, EnvkitError) as error:
                    reason = str(error)
                    await replica.stop()
            self._announce(f"the vLLM server {replica.index} is back at {replica.url}")

    def _give_up(self, replica: Replica, reason: str) -> None:
        replica.is_gone = True
        if all(one.is_gone for one in self._replicas):
            limit = self._settings.max_restarts
            self._failure = EnvkitError(
                f"all vLLM servers were lost more than {limit} times, the last one because: "
                f"{reason}; continue from the last checkpoint with --resume"
            )
        self._notify()

    async def _on_each(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[object]]) -> None:
        """Call something for several replicas at once. Raise the first error when all have finished."""
        errors: list[EnvkitError] = []

        async def one(replica: Replica) -> None:
            try:
                await call(replica)
            except ServerLostError as error:
                self._lose(replica, error)
            except EnvkitError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(one, replica)
        if errors:
            raise errors[0]

    async def _install(self, replica: Replica, weights: Weights) -> None:
        await replica.client.load(await self._fetched(replica, weights))
        replica.version = weights.version
        self._routing.clear(replica.index)

    async def _fetched(self, replica: Replica, weights: Weights) -> Weights:
        """Return `weights` with a location that the server of a replica can read. If it must, it fetches them."""
        settings = self._settings
        if settings.shares_files or (settings.weights_url is None and is_this_machine(replica.url)):
            return weights
        if replica.fetched != weights:
            if self._weight_server is None:
                self._weight_server = WeightServer(settings.weights_url)
            url = await self._weight_server.offer(weights, replica.url)
            replica.fetched_path, replica.fetched = await replica.client.fetch(url), weights
        return replace(weights, location=replica.fetched_path)

    def _lose(self, replica: Replica, error: ServerLostError) -> None:
        replica.lose(error)
        self._notify()

    async def _stop(self) -> None:
        async with anyio.create_task_group() as tasks:
            for replica in self._replicas:
                tasks.start_soon(replica.stop)
        if self._weight_server is not None:
            await self._weight_server.close()

    async def _replica_for(self, request: Request) -> Replica | None:
        """Wait until a replica can take the request, and return it; None if the request was aborted."""
        pinned = request.pinned
        allowed = self._replicas if pinned is None else [pinned]
        while not request.is_aborted:
            if self._failure is not None:
                raise self._failure
            if pinned is not None and pinned.is_gone:
                request.is_aborted = True
                return None
            loads = {
                one.index: one.running
                for one in allowed
                if one.is_ready and (not one.is_draining or one is pinned) and one.running < self._settings.max_num_seqs
            }
            if loads and (self._pause is None or request.is_frozen):
                chosen = self._routing.choose([*request.prompt, *request.tokens], request.session, loads)
                return self._replicas[chosen]
            await self._changed.wait()
        return None

    async def _add_part(self, request: Request, replica: Replica) -> None:
        """Generate on `replica` until the completion is complete or aborted, or the replica is lost."""
        part, version, label = Part(), replica.version, replica.client.label(replica.version)
        request.replica, request.parts = replica, request.parts + 1
        replica.running += 1
        try:
            await replica.client.generate(
                request.part_id,
                [*request.prompt, *request.tokens],
                request.params,
                max_tokens=request.params.max_tokens - len(request.tokens),
                seed=request.seed if self._settings.seeds else None,
                generated_s=request.generated_s,
                into=part,
            )
            if UNKNOWN in part.versions:
                part = Part()
                raise ServerLostError("it was started again by someone else")
        except ServerLostError as error:
            self._lose(replica, error)
        finally:
            request.take(part, version)
            request.replica = None
            replica.running -= 1
            self._notify()
        request.check(part, label, replica.url)
        if part.finish == "abort" and not part.tokens:
            await anyio.sleep(_ABORT_EVERY_S)  # somebody else keeps aborting it; do not retry at once

    async def _end(self, requests: Sequence[Request]) -> None:
        """Abort `requests` on the servers that generate for them now."""
        where = [(request, replica) for request in requests if (replica := request.replica) is not None]
        parts = {request.id: request.parts for request, _ in where}
        while where := [
            (request, replica)
            for request, replica in where
            if request.replica is replica and request.parts == parts[request.id]
        ]:
            for replica in {replica for _, replica in where}:
                try:
                    await replica.client.abort([request.part_id for request, at in where if at is replica])
                except ServerLostError as error:
                    self._lose(replica, error)
            with anyio.move_on_after(_ABORT_EVERY_S):
                await self._changed.wait()

    def _notify(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()
