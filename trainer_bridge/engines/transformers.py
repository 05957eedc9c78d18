"""The transformers engine: continuous batching in this process, with a KV cache that outlives the turns of an episode.

An engine step admits the requests that have arrived, sorted by session, processes their prompts, and then samples one
token for every running request. A request leaves the batch with its last token. Requests that arrive in the same
iteration of the event loop form one batch, so episodes in lockstep always give the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from envkit import clock
from envkit.errors import DeadlineError, SessionConflictError
from envkit.types import Completion, EngineHealth, FinishReason, Ints, PauseMode, SamplingParams, Weights, ints

from ..output_layer import widen
from ..threads import torch_threads
from ..weights.files import load_weights
from .progress import Progress
from .sampling import sample
from .slots import SlotCache

Source = Callable[[PreTrainedModel], Awaitable[int]]
"""Copies the trainer's weights into a model and returns their version."""

_SHARED_TOKENS = 8
"""Minimum number of tokens to process for which requests with the same beginning share the work."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Request(Progress):
    prompt: Ints
    session: str
    is_cached: bool = True
    wake: anyio.Event = field(default_factory=anyio.Event)
    slot: int = -1
    finish: FinishReason | None = None
    failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def ids(self) -> Ints:
        """The prompt and the tokens so far."""
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int32)]) if self.tokens else self.prompt

    def count_time(self, seconds: float) -> None:
        """Count the time in which a token after the first one was sampled; a request that is over time fails."""
        self.generated_s += seconds
        if self.generated_s >= self.params.timeout_s and not self.is_done:
            limit = self.params.timeout_s
            self.failure = DeadlineError(f"the engine did not complete a prompt within {limit:g} s of its first token")


class TransformersEngine:
    """Generates text with a causal language model of the transformers library.

    It implements `envkit.protocols.FreezableEngine`.

    Args:
        model: Model in evaluation mode, on its device; `load` overwrites its weights.
        pad_id: Id of the padding token; padding is always masked.
        batch_tokens: Maximum number of prompt tokens in one forward pass, including padding.
        threads: Number of torch threads; 0 means the current number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        batch_tokens: int = 65536,
        threads: int = 0,
    ) -> None:
        widen(model)
        self._model = model
        self._pad_id = pad_id
        self._batch_tokens = batch_tokens
        self._threads = threads
        self._source: Source | None = None
        self._version = 0
        self._cache = SlotCache(model, pad_id=pad_id)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._releases: dict[str, bool] = {}
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._driver: _Request | None = None
        self._busy = anyio.Lock()
        self._pause: PauseMode | None = None
        self._idle = anyio.Event()
        self._unnamed = itertools.count()

    @property
    def repeats(self) -> bool:
        """True: requests that are made together form one batch, in the order of their sessions."""
        return True

    @property
    def description(self) -> str:
        """Class, size and device of the model, in one line."""
        count = sum(weight.numel() for weight in self._model.parameters())
        return f"{type(self._model).__name__} with {count:,} parameters on {self._model.device.type}"

    @property
    def dtype(self) -> str:
        """Number format of the weights, such as ``"bfloat16"``."""
        return str(self._model.dtype).removeprefix("torch.")

    def copy_from(self, source: Source) -> None:
        """Let `load` get weights without a location from `source`, such as `TorchTrainer.copy_to`."""
        self._source = source

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        """See `envkit.protocols.Engine.generate`."""
        name = session if session is not None else f"\uffff{next(self._unnamed):016d}"
        request = _Request(params, so_far, prompt=ints(prompt_ids), session=name, is_cached=session is not None)
        if request.end is not None:
            return request.completion(request.end)
        others = () if session is None else (*self._running, *self._waiting)
        if any(one.session == session and not one.is_done for one in others):
            raise SessionConflictError(
                f"session {name}: a completion is in progress; wait for it, or use another session"
            )
        self._waiting.append(request)
        try:
            while not request.is_done:
                if self._driver is None and self._can_step():
                    await self._drive(request)
                else:
                    await request.wake.wait()
                    request.wake = anyio.Event()
        except BaseException:
            request.finish = FinishReason.ABORTED
            if self._driver is None:
                self._nominate()
            raise
        finally:
            if session is None:
                self._release(name, keeps_tokens=False)
        if request.failure is not None:
            raise request.failure
        assert request.finish is not None
        return request.completion(request.finish)

    async def abort(self, session: str) -> None:
        """See `envkit.protocols.Engine.abort`."""
        async with self._busy:
            self._abort([one for one in (*self._running, *self._waiting) if one.session == session])

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """See `envkit.protocols.Engine.pause`."""
        self._pause = mode
        async with self._busy:
            if mode is PauseMode.ABORT:
                self._abort([*self._running, *self._waiting])
        while mode is PauseMode.WAIT and any(not request.is_done for request in self._running):
            if self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()

    async def resume(self) -> None:
        """See `envkit.protocols.Engine.resume`."""
        self._pause = None
        self._nominate()

    async def health(self) -> EngineHealth:
        """See `envkit.protocols.Engine.health`."""
        # Requests that were aborted or cancelled are in the lists until the next engine step.
        running, waiting = (sum(not one.is_done for one in many) for many in (self._running, self._waiting))
        return EngineHealth(self._version, running, waiting, self._pause is not None, self._cache.fed_tokens)

    def forget(self, session: str) -> None:
        """See `envkit.protocols.Engine.forget`. Other sessions can use the tokens as long as there are sessions."""
        self._release(session, keeps_tokens=True)

    def _release(self, session: str, *, keeps_tokens: bool) -> None:
        """Release the slot of a session once it is no longer written to. Without its tokens, it is used next."""
        if any(request.session == session for request in self._running):
            self._releases[session] = keeps_tokens
        elif (slot := self._slots.pop(session, None)) is not None:
            if keeps_tokens:
                self._free.append(slot)
            else:
                self._cache.truncate(slot, 0)
                self._free.insert(0, slot)
            if not self._slots:
                # The next episodes must not depend on these: after a resume, they begin with an empty cache.
                self._cache.clear()
                self._free.sort()

    def _abort(self, requests: Sequence[_Request]) -> None:
        """End requests with the tokens that they have. Call this method only between engine steps."""
        for request in requests:
            request.finish = request.finish or FinishReason.ABORTED
            request.wake.set()

    async def load(self, weights: Weights) -> None:
        """Load new weights and drop all caches. Without `pause`, wait for the completions that are being generated.

        Raises:
            RuntimeError: The weights belong to another model; the engine's weights are unchanged.
            ValueError: The weights have no location, and the engine has no source.
        """
        is_paused = self._pause is not None
        try:
            if not is_paused:
                await self.pause(PauseMode.WAIT)
            async with self._busy:
                version = await self._read(weights)
                self._cache.clear()
                # Completions that a pause keeps go on with the new weights: their tokens are processed again.
                self._waiting = [*self._running, *self._waiting]
                self._running = []
                self._version = version
        finally:
            if not is_paused:
                await self.resume()

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[TransformersEngine]:
        """See `envkit.protocols.FreezableEngine.frozen`. It has a copy of the weights and a cache of its own."""
        async with self._busy:
            model = await clock.to_thread(deepcopy, self._model)
            copy = TransformersEngine(
                model, pad_id=self._pad_id, batch_tokens=self._batch_tokens, threads=self._threads
            )
            copy._version = self._version
        yield copy

    async def _read(self, weights: Weights) -> int:
        """Read the weights into the model and return their version."""
        if weights.location:
            await clock.to_thread(load_weights, self._model, Path(weights.location))
            return weights.version
        if self._source is None:
            raise ValueError(
                "the weights have no location, and the engine has no source; pass the trainer's copy_to to copy_from"
            )
        return await self._source(self._model)

    def _can_step(self) -> bool:
        """Whether an engine step is allowed: a pause that waits allows steps until nothing runs."""
        return self._pause is None or (self._pause is PauseMode.WAIT and bool(self._running))

    async def _drive(self, request: _Request) -> None:
        """Run engine steps until `request` is done, then let another caller drive."""
        self._driver = request
        try:
            while not request.is_done and self._can_step():
                with anyio.CancelScope(shield=True):
                    # Requests of the same iteration of the event loop must be in the same batch.
                    await anyio.lowlevel.cancel_shielded_checkpoint()
                    async with self._busy:
                        if self._can_step():  # `pause` may have been called meanwhile
                            await self._step()
                await anyio.lowlevel.checkpoint_if_cancelled()
        finally:
            self._driver = None
            self._nominate()

    def _nominate(self) -> None:
        """Wake a caller, which then drives the engine."""
        for request in (*self._running, *self._waiting):
            if not request.is_done:
                request.wake.set()
                return
        self._idle.set()

    async def _step(self) -> None:
        """Sample one token for every request that runs or may begin, and wake the callers of those that end."""
        self._drop_finished()
        new: list[_Request] = []
        if self._pause is None:
            new, self._waiting = sorted(self._waiting, key=lambda one: one.session), []
        begun, self._running = self._running, [*self._running, *new]
        if not self._running:
            return
        try:
            self._assign_slots(new)
            began_s = clock.now()
            await clock.to_thread(self._compute, begun, new)
            seconds = clock.now() - began_s
            for request in begun:
                request.count_time(seconds)
        except Exception as error:
            self._cache.clear()
            for request in self._running:
                request.failure = None if request.is_done else error
        self._drop_finished()

    def _drop_finished(self) -> None:
        for requests in (self._running, self._waiting):
            for request in requests:
                if request.is_done:
                    request.wake.set()
        self._running = [request for request in self._running if not request.is_done]
        self._waiting = [request for request in self._waiting if not request.is_done]
        releases, self._releases = self._releases, {}
        for session, keeps_tokens in releases.items():
            self._release(session, keeps_tokens=keeps_tokens)
        if not self._running:
            self._idle.set()

    @torch.inference_mode()
    def _compute(self, begun: list[_Request], new: list[_Request]) -> None:
        with torch_threads(self._threads):
            if begun:
                slots = [request.slot for request in begun]
                feeds = [ints(request.tokens[-1:]) for request in begun]
                self._pick(begun, self._cache.forward(slots, feeds))
            if new:
                self._pick(new, self._prefill(new))

    def _pick(self, requests: list[_Request], logits_BV: Tensor) -> None:
        picks = sample(logits_BV, [one.params for one in requests], [len(one.tokens) for one in requests])
        for request, (token, logprob) in zip(requests, picks, strict=True):
            if not request.is_done:
                request.add([token], [logprob], self._version)
                if (end := request.end) is not None:  # an abort in the event loop may have just ended it
                    request.finish = end

    def _prefill(self, requests: list[_Request]) -> Tensor:
        """Process the prompts of new requests and return the logits of their next tokens [B, V].

        Equal prompts are processed once, and so is what all prompts begin with.
        """
        ids = [request.ids for request in requests]
        cached = self._place(requests, ids)
        leaders: dict[bytes, int] = {}
        leader_of = [leaders.setdefault(one.tobytes(), row) for row, one in enumerate(ids)]
        shared = [row for row, leader in enumerate(leader_of) if leader != row and len(ids[row]) - cached[row] > 1]
        rows = sorted({*range(len(requests))} - set(shared))
        self._feed_common([requests[row].slot for row in rows], [ids[row] for row in rows])
        logits: dict[int, Tensor] = {}
        for part in self._parts(rows, ids):
            slots = [requests[row].slot for row in part]
            feeds = [ids[row][self._cache.lengths[requests[row].slot] :] for row in part]
            logits |= zip(part, self._cache.forward(slots, feeds), strict=True)
        if shared:
            leading = [requests[leader_of[row]].slot for row in shared]
            self._cache.copy(leading, [requests[row].slot for row in shared], [len(ids[row]) for row in shared])
            logits |= {row: logits[leader_of[row]] for row in shared}
        return torch.stack([logits[row] for row in range(len(requests))])

    def _assign_slots(self, requests: list[_Request]) -> None:
        """Set the slot of each request: its session's slot, or one that has been free for the longest time."""
        fresh = [request for request in requests if request.session not in self._slots]
        if len(fresh) > len(self._free):
            known = len(self._cache)
            self._cache.grow(known + len(fresh) - len(self._free))
            self._free = [*range(known, len(self._cache)), *self._free]
        # Neighbouring slots in the order of the rows can be read without a copy.
        chosen, self._free = sorted(self._free[: len(fresh)]), self._free[len(fresh) :]
        self._slots |= zip((request.session for request in fresh), chosen, strict=True)
        for request in requests:
            request.slot = self._slots[request.session]

    def _place(self, requests: list[_Request], ids: list[Ints]) -> list[int]:
        """Let each request's slot begin with as much of its prompt as is cached in any slot; return the lengths.

        A request without a session reads nothing that is cached.
        """
        cache = self._cache
        sources: list[int] = []
        lengths: list[int] = []
        for request, prompt in zip(requests, ids, strict=True):
            source, length = request.slot, 0
            if request.is_cached:
                length = cache.common(source, prompt)
                if not length or length < cache.lengths[source]:
                    other, longer = cache.match(prompt)
                    source, length = (other, longer) if longer > length else (source, length)
            sources.append(source)
            lengths.append(length)
        moved = [row for row, request in enumerate(requests) if sources[row] != request.slot]
        cache.copy(
            [sources[row] for row in moved], [requests[row].slot for row in moved], [lengths[row] for row in moved]
        )
        for request, length in zip(requests, lengths, strict=True):
            cache.truncate(request.slot, length)
        return lengths

    def _feed_common(self, slots: list[int], prompts: list[Ints]) -> None:
        """Process once what all prompts begin with, unless it is cached."""
        if len(prompts) < 2:
            return
        shortest = min(map(len, prompts)) - 1
        same = np.stack([one[:shortest] for one in prompts])
        different = np.flatnonzero((same != same[0]).any(0))
        common = int(different[0]) if len(different) else shortest
        lengths = self._cache.lengths[slots]
        if common - lengths.max() < _SHARED_TOKENS:
            return
        first = slots[int(lengths.argmax())]
        self._cache.forward([first], [prompts[0][int(lengths.max()) : common]])
        others = [slot for slot in slots if slot != first]
        self._cache.copy([first] * len(others), others, [common] * len(others))

    def _parts(self, rows: list[int], ids: list[Ints]) -> list[list[int]]:
        """Split the rows into forward passes of at most `batch_tokens` tokens."""
        parts: list[list[int]] = []
        for row in rows:
            longest = max((len(ids[one]) for one in [*(parts[-1] if parts else []), row]), default=0)
            if not parts or (len(parts[-1]) + 1) * longest > self._batch_tokens:
                parts.append([])
            parts[-1].append(row)
        return parts
