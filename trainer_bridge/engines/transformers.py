"""The transformers engine: batched generation in this process, with a key-value cache per episode.

Requests that arrive in the same iteration of the event loop form one batch, sorted by session name. Tokens are sampled
by inverse transform sampling; the uniform number is a hash of the request's seed and the token's position. The result
therefore depends on the weights and the batch alone, not on the state of a random number generator. If all callers of a
batch are cancelled, generation stops after the current decode step.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from envkit import clock
from envkit.types import Completion, FinishReason, SamplingParams, Weights, stable_hash

from ..threads import torch_threads
from .weight_files import copy_weights, load_weights

_U64 = float(1 << 64)

_SAMPLED_NUMBERS = 1 << 21
"""Maximum number of logits (rows times vocabulary) to sample from in one operation."""

_SHARED_TOKENS = 8
"""Minimum length of the prompts' common prefix for which a separate forward pass saves time."""

_ENDED_SHARE = 8
"""A large model drops the rows of ended completions when they are at least 1 / `_ENDED_SHARE` of a block's rows."""


@dataclass(slots=True)
class _GenerationRequest:
    prompt: list[int]
    params: SamplingParams
    session: str
    done: anyio.Event = field(default_factory=anyio.Event)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason = FinishReason.LENGTH
    failure: BaseException | None = None
    is_abandoned: bool = False


@dataclass(slots=True)
class _Block:
    """Sessions whose key-value caches are rows of the same tensors.

    Attributes:
        sessions: The session name of each row [B].
        seen: The tokens of each row that are in the cache [B, ...].
        cache: Keys and values of each layer [B, heads, L, width].
        mask_BL: 1 where the cache contains a token of the row, 0 for padding.
    """

    sessions: list[str]
    seen: list[list[int]]
    cache: DynamicCache
    mask_BL: Tensor


class TransformersEngine:
    """Generates text with a causal language model of the transformers library.

    It implements `envkit.protocols.Engine` and `envkit.protocols.WeightSink`.

    Args:
        model: Model in evaluation mode, on its device; `load` overwrites its weights.
        pad_id: Id of the padding token; padding is always masked.
        batch_tokens: Maximum number of prompt tokens, including padding, in one batch of new sessions.
        threads: Number of torch threads; 0 means the current number.
        is_large: Whether to process the common prefix of new prompts only once, and to drop the rows of ended
            completions from a batch. A matrix product with fewer rows may round differently, so this is off for tiny
            policies, whose runs must be repeatable.
        source: Model of the same architecture. `load` copies its weights if the given weights have no location.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        batch_tokens: int = 65536,
        threads: int = 0,
        is_large: bool = False,
        source: PreTrainedModel | None = None,
    ) -> None:
        self._model = model
        # transformers 5.24 renamed the argument and warns about the old name.
        is_renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if is_renamed else "past_key_values"
        self._pad_id = pad_id
        self._batch_tokens = batch_tokens
        self._threads = threads
        self._is_large = is_large
        self._source = source
        self._version = 0
        self._blocks: list[_Block] = []
        self._pending: list[_GenerationRequest] = []
        self._forgotten: set[str] = set()
        self._unnamed = itertools.count()
        self._busy = anyio.Lock()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """See `envkit.protocols.Engine.generate`."""
        name = session if session is not None else f"\uffff{next(self._unnamed):016d}"
        request = _GenerationRequest(list(prompt_ids), params, name)
        self._pending.append(request)
        try:
            if len(self._pending) == 1:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_note_cancellation, request)
                    # If this caller is cancelled, finish the batch anyway, because other callers also wait for it.
                    with anyio.CancelScope(shield=True):
                        await anyio.lowlevel.cancel_shielded_checkpoint()
                        async with self._busy:
                            batch, self._pending = sorted(self._pending, key=lambda one: one.session), []
                            await self._serve(batch)
                    tasks.cancel_scope.cancel()
            await request.done.wait()
        finally:
            request.is_abandoned = True
            if session is None:
                self.forget(name)
        if request.failure is not None:
            raise request.failure
        return Completion(
            tuple(request.tokens), tuple(request.logprobs), request.finish, ((self._version, len(request.tokens)),)
        )

    def forget(self, session: str) -> None:
        """See `envkit.protocols.Engine.forget`."""
        self._forgotten.add(session)
        if not self._busy.locked():
            self._drop_forgotten()

    async def load(self, weights: Weights) -> None:
        """Load new weights and drop all caches.

        Raises:
            RuntimeError: The weights belong to another model; the engine's weights are unchanged.
            ValueError: The weights have no location, and the engine has no `source`.
        """
        async with self._busy:
            self._blocks.clear()
            await clock.to_thread(self._read, weights.location)
            self._version = weights.version

    def _read(self, location: str) -> None:
        if location:
            load_weights(self._model, Path(location))
        elif self._source is not None:
            copy_weights(self._source, self._model)
        else:
            raise ValueError(
                "the weights have no location, and the engine has no source; pass the trainer's model as source"
            )

    async def _serve(self, batch: list[_GenerationRequest]) -> None:
        try:
            await clock.to_thread(self._generate, batch)
        except Exception as error:
            for request in batch:
                request.failure = error
        finally:
            self._drop_forgotten()
            for request in batch:
                request.done.set()

    def _drop_forgotten(self) -> None:
        """Drop forgotten sessions. Call this method only between batches, because a batch changes `_blocks`."""
        for block in self._blocks:
            # Clear only the session's name. `_select` and `_take` leave out its row when they next copy the block.
            block.sessions = ["" if name in self._forgotten else name for name in block.sessions]
        self._blocks = [block for block in self._blocks if any(block.sessions)]
        self._forgotten.clear()

    @torch.inference_mode()
    def _generate(self, batch: list[_GenerationRequest]) -> None:
        with torch_threads(self._threads):
            self._generate_all(batch)

    def _generate_all(self, batch: list[_GenerationRequest]) -> None:
        fresh: list[_GenerationRequest] = []
        known: dict[int, list[_GenerationRequest]] = {}
        for request in batch:
            number = self._block_of(request)
            if number is None:
                fresh.append(request)
            else:
                known.setdefault(number, []).append(request)
        old_blocks, self._blocks = self._blocks, []
        for number, requests in sorted(known.items()):
            self._blocks.append(self._run(requests, _select(old_blocks[number], requests)))
        kept = [block for number, block in enumerate(old_blocks) if number not in known]
        for requests in self._chunks(fresh):
            self._blocks.append(self._run(requests, self._empty(requests)))
        self._blocks += kept

    def _block_of(self, request: _GenerationRequest) -> int | None:
        """Return the index of the session's `_Block` if the tokens in its cache are a proper prefix of the prompt."""
        for number, block in enumerate(self._blocks):
            if request.session in block.sessions:
                seen = block.seen[block.sessions.index(request.session)]
                if len(seen) < len(request.prompt) and request.prompt[: len(seen)] == seen:
                    return number
        return None

    def _chunks(self, requests: list[_GenerationRequest]) -> list[list[_GenerationRequest]]:
        chunks: list[list[_GenerationRequest]] = []
        longest = 0
        for request in requests:
            longest = max(longest, len(request.prompt))
            if not chunks or (len(chunks[-1]) + 1) * longest > self._batch_tokens:
                chunks.append([])
                longest = len(request.prompt)
            chunks[-1].append(request)
        return chunks

    def _empty(self, requests: list[_GenerationRequest]) -> _Block:
        mask_BL = torch.zeros(len(requests), 0, dtype=torch.long, device=self._model.device)
        sessions = [request.session for request in requests]
        return _Block(sessions, [[] for _ in requests], DynamicCache(), mask_BL)

    def _run(self, requests: list[_GenerationRequest], block: _Block) -> _Block:
        """Feed each row the prompt tokens that its cache lacks, sample completions, and return the resulting block.

        Sampling stops when all completions have ended or all callers were cancelled.
        """
        feeds = [request.prompt[len(seen) :] for request, seen in zip(requests, block.seen, strict=True)]
        ended_blocks: list[_Block] = []
        for position in range(max(request.params.max_tokens for request in requests)):
            if all(request.is_abandoned for request in requests):
                break
            is_first = self._is_large and not any(block.seen)
            logits_BV = self._forward_once_each(block, feeds) if is_first else self._forward(block, feeds)
            feeds = [[] for _ in requests]
            picks = _sample(logits_BV, requests, position)
            for row, (request, (token, logprob)) in enumerate(zip(requests, picks, strict=True)):
                ended = request.finish is FinishReason.STOP or len(request.tokens) < position
                if ended or position >= request.params.max_tokens:
                    continue
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if token in request.params.stop:
                    request.finish = FinishReason.STOP
                elif position + 1 < request.params.max_tokens:
                    feeds[row] = [token]
            if not any(feeds):
                break
            ended_rows = [row for row, feed in enumerate(feeds) if not feed]
            if self._is_large and len(ended_rows) * _ENDED_SHARE >= len(feeds):
                going_rows = [row for row, feed in enumerate(feeds) if feed]
                ended_blocks.append(_take(block, ended_rows))
                block = _take(block, going_rows)
                requests, feeds = [requests[row] for row in going_rows], [feeds[row] for row in going_rows]
        return _join([*ended_blocks, block])

    def _forward_once_each(self, block: _Block, feeds: list[list[int]]) -> Tensor:
        """Call `_forward` for a new block. Process equal prompts, and the common prefix of all prompts, only once."""
        number: dict[tuple[int, ...], int] = {}
        rows = [number.setdefault(tuple(feed), len(number)) for feed in feeds]
        prompts = [list(prompt) for prompt in number]
        block.mask_BL, block.seen = block.mask_BL[:1], [[]]
        # The common prefix of the first and the last prompt in sorted order is the common prefix of all prompts.
        pairs = zip(min(prompts), max(prompts)[:-1], strict=False)
        common = [token for token, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if len(common) >= _SHARED_TOKENS:
            self._forward(block, [common[: min(map(len, prompts)) - 1]])
        self._repeat(block, [0] * len(prompts))
        logits_UV = self._forward(block, [prompt[len(block.seen[0]) :] for prompt in prompts])
        self._repeat(block, rows)
        return logits_UV[torch.tensor(rows, device=self._model.device)]

    def _repeat(self, block: _Block, rows: list[int]) -> None:
        """Replace the rows of a block with copies of the rows at the indices `rows`."""
        index_B = torch.tensor(rows, device=self._model.device)
        if block.mask_BL.shape[1]:
            block.cache.batch_select_indices(index_B)
        block.mask_BL = block.mask_BL[index_B]
        block.seen = [list(block.seen[row]) for row in rows]

    def _forward(self, block: _Block, feeds: list[list[int]]) -> Tensor:
        """Append `feeds`, a list of tokens per row, to the block; return the logits of each row's next token [B, V]."""
        device = self._model.device
        width = max(len(feed) for feed in feeds)
        ids = [[self._pad_id] * (width - len(feed)) + feed for feed in feeds]
        new = [[0] * (width - len(feed)) + [1] * len(feed) for feed in feeds]
        new_mask_BL = torch.tensor(new, dtype=torch.long, device=device)
        block.mask_BL = torch.cat([block.mask_BL, new_mask_BL], dim=1)
        position_BL = (block.mask_BL.cumsum(1) - 1).clamp(min=0)[:, -width:]
        output = self._model(
            input_ids=torch.tensor(ids, dtype=torch.long, device=device),
            attention_mask=None if bool(block.mask_BL.all()) else block.mask_BL,
            position_ids=position_BL,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: block.cache},
        )
        for seen, feed in zip(block.seen, feeds, strict=True):
            seen += feed
        logits: Tensor = output.logits[:, -1].float()
        return logits


async def _note_cancellation(request: _GenerationRequest) -> None:
    """Mark a request as abandoned when its caller is cancelled. The caller itself is shielded and cannot notice."""
    try:
        await anyio.Event().wait()
    finally:
        request.is_abandoned = True


def _select(block: _Block, requests: list[_GenerationRequest]) -> _Block:
    """Return a block with the rows of `block` that belong to `requests`, in the order of `requests`."""
    rows = [block.sessions.index(request.session) for request in requests]
    if rows == list(range(len(block.sessions))):
        return block
    return _take(block, rows)


def _take(block: _Block, rows: list[int]) -> _Block:
    """Return a new block with the rows of `block` at the indices `rows`; `block` is not changed."""
    index_B = torch.tensor(rows, device=block.mask_BL.device)
    cache = copy.copy(block.cache)
    cache.layers = [copy.copy(layer) for layer in block.cache.layers]
    cache.batch_select_indices(index_B)
    sessions = [block.sessions[row] for row in rows]
    return _Block(sessions, [block.seen[row] for row in rows], cache, block.mask_BL[index_B])


def _join(blocks: list[_Block]) -> _Block:
    """Return one block with the rows of all blocks; shorter caches are padded on the right."""
    if len(blocks) == 1:
        return blocks[0]
    widths = [block.mask_BL.shape[1] for block in blocks]
    gaps = [max(widths) - width for width in widths]
    for layer, *others in zip(*(block.cache.layers for block in blocks), strict=True):
        for name in ("keys", "values"):
            tensors = [getattr(one, name) for one in (layer, *others)]
            padded = [functional.pad(one, (0, 0, 0, gap)) for one, gap in zip(tensors, gaps, strict=True)]
            setattr(layer, name, torch.cat(padded))
    mask_BL = torch.cat([functional.pad(block.mask_BL, (0, gap)) for block, gap in zip(blocks, gaps, strict=True)])
    sessions = [name for block in blocks for name in block.sessions]
    return _Block(sessions, [seen for block in blocks for seen in block.seen], blocks[0].cache, mask_BL)


def _sample(logits_BV: Tensor, requests: list[_GenerationRequest], position: int) -> list[tuple[int, float]]:
    """Sample the token at index `position` of each row's completion; return the tokens with log-probabilities (nats).

    The log-probabilities take the temperature into account, but not top-p and top-k.
    """
    count = max(_SAMPLED_NUMBERS // logits_BV.shape[1], 1)
    if len(requests) > count:
        parts = [slice(first, first + count) for first in range(0, len(requests), count)]
        return [pick for rows in parts for pick in _sample(logits_BV[rows], requests[rows], position)]
    greedy = torch.tensor([request.params.temperature == 0 for request in requests], device=logits_BV.device)
    heat_B = torch.tensor([request.params.temperature or 1.0 for request in requests], device=logits_BV.device)
    logp_BV = torch.log_softmax(logits_BV / heat_B[:, None], dim=-1)
    numbers = [stable_hash(request.params.seed, position) / _U64 for request in requests]
    weight_BV = _nucleus(logp_BV.exp().double(), requests)
    total_BV = weight_BV.cumsum(-1)
    number_B1 = torch.tensor(numbers, dtype=torch.float64, device=logits_BV.device)[:, None] * total_BV[:, -1:]
    drawn_B = torch.searchsorted(total_BV, number_B1, right=True).squeeze(1).clamp(max=logits_BV.shape[1] - 1)
    token_B = torch.where(greedy, logp_BV.argmax(-1), drawn_B)
    chosen_B = logp_BV.gather(1, token_B[:, None]).squeeze(1)
    return list(zip(token_B.tolist(), chosen_B.tolist(), strict=True))


def _nucleus(weight_BV: Tensor, requests: list[_GenerationRequest]) -> Tensor:
    """Set the weight of tokens outside top-k and top-p to zero, but always keep the most likely token."""
    if all(request.params.top_p >= 1 and request.params.top_k <= 0 for request in requests):
        return weight_BV
    size = weight_BV.shape[1]
    sorted_BV, order_BV = weight_BV.sort(dim=-1, descending=True)
    top_k_B1 = torch.tensor([[request.params.top_k or size] for request in requests], device=weight_BV.device)
    top_p_B1 = torch.tensor([[request.params.top_p] for request in requests], device=weight_BV.device)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    rank_V = torch.arange(size, device=weight_BV.device)
    dropped_BV = (rank_V >= top_k_B1) | ((before_BV >= top_p_B1) & (rank_V > 0))
    return torch.zeros_like(weight_BV).scatter(1, order_BV, sorted_BV.masked_fill(dropped_BV, 0.0))


def open_model(path: str, *, device: str, is_local: bool, dtype: str = "float32") -> Any:
    """Load a causal language model.

    Args:
        path: Folder, or name on the hub.
        device: ``"cpu"`` or ``"cuda"``.
        is_local: Whether to use only files on this machine, including cached models from the hub.
        dtype: Data type of the weights. Training needs float32, since bfloat16 would round updates of 1e-6 to zero.
    """
    from transformers import AutoModelForCausalLM

    found = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=found, local_files_only=is_local)
    return model.to(device).eval()


def copy_to_play(model: Any, dtype: str) -> Any:
    """Return a copy of a model for sampling, with weights in ``"float32"`` or ``"bfloat16"``.

    `TransformersEngine.load` rounds new weights to this type. Buffers are not converted, since rounding the angles of
    rotary embeddings would distort positions.
    """
    playing = copy.deepcopy(model)
    for weight in playing.parameters():
        weight.data = weight.data.to(getattr(torch, dtype))
    return playing
