"""The KV cache of the transformers engine: one slot per session, each with the tokens of one sequence.

A slot whose session has ended keeps its tokens until another session needs the slot, so that prompts which begin with
the same tokens reuse them. Rows of a forward pass have any length: each row attends to its own slot only.

Axes: B rows of a pass, S slots, C tokens of a slot, W new tokens of a pass (padded on the left), N the same without
padding, H heads, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from envkit.errors import UsageError
from envkit.types import Ints

_GROWTH = 64
"""Slots and their tokens grow in steps of this number."""


class SlotCache:
    """Slots of a model in evaluation mode.

    Attributes:
        lengths: Number of tokens in each slot [S].
        fed_tokens: Tokens that the model has processed so far.
    """

    def __init__(self, model: PreTrainedModel, *, pad_id: int) -> None:
        self._model = model
        # transformers 5.24 renamed the argument and warns about the old name.
        is_renamed = "cache" in inspect.signature(model.forward).parameters
        self._argument = "cache" if is_renamed else "past_key_values"
        self._pad_id = pad_id
        config = model.config.get_text_config()
        self._windows = _windows(config)
        self._is_eager = model.config._attn_implementation == "eager"
        self._shape = _Shape()
        self._layers = [_SlotLayer(self._shape) for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._tokens: Any = np.zeros((0, 0), dtype=np.int32)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.fed_tokens = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def clear(self) -> None:
        """Forget the tokens of all slots, for example because the model has new weights."""
        self.lengths[:] = 0

    def grow(self, slots: int) -> None:
        """Make sure that there are at least `slots` slots."""
        self._resize(slots, self._shape.capacity)

    def match(self, prompt: Ints) -> tuple[int, int]:
        """Return the slot with the longest common prefix with `prompt`, and the prefix's length without the last token.

        At least the last token must be processed again, because its logits are not kept.
        """
        width = min(len(prompt) - 1, self._shape.capacity)
        if not len(self) or width < 1:
            return 0, 0
        different_SW = self._tokens[:, :width] != prompt[None, :width]
        different_SW |= np.arange(width)[None] >= self.lengths[:, None]
        common_S = np.where(different_SW.any(1), different_SW.argmax(1), width)
        best = int(common_S.argmax())
        return best, int(common_S[best])

    def common(self, slot: int, prompt: Ints) -> int:
        """Return the length of the common prefix of a slot and `prompt`, without the prompt's last token."""
        width = min(len(prompt) - 1, int(self.lengths[slot]))
        different = np.flatnonzero(self._tokens[slot, :width] != prompt[:width])
        return int(different[0]) if len(different) else width

    def truncate(self, slot: int, length: int) -> None:
        """Drop the tokens of a slot after the first `length`."""
        self.lengths[slot] = length

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Replace the tokens of each target slot by the first tokens of its source slot.

        All sources are read before the first target is written.
        """
        width = max(lengths, default=0)
        if width:
            source_B, target_B = torch.tensor(sources), torch.tensor(targets)
            for layer in self._layers:
                for cached in (layer.keys, layer.values):
                    if cached is not None:
                        cached[target_B, :, :width] = cached[source_B, :, :width]
            self._tokens[list(targets), :width] = self._tokens[list(sources), :width]
        self.lengths[list(targets)] = lengths

    def forward(self, slots: Sequence[int], feeds: Sequence[Ints]) -> Tensor:
        """Append the tokens `feeds` to the slots, and return the logits of the next token of each slot [B, V]."""
        starts = self.lengths[list(slots)]
        counts = np.array([len(feed) for feed in feeds])
        width = int(counts.max())
        self._resize(len(self), int((starts + counts).max()))
        ids_BW = np.full((len(slots), width), self._pad_id, dtype=np.int64)
        for row, feed in enumerate(feeds):
            ids_BW[row, width - len(feed) :] = feed
        place_BW = (starts + counts - width)[:, None] + np.arange(width)[None]
        is_real_BW = place_BW >= starts[:, None]
        rows, columns = np.nonzero(is_real_BW)
        slot_N, place_N = np.asarray(slots)[rows], place_BW[rows, columns]
        device = self._model.device
        self._shape.begin(slots, torch.from_numpy(is_real_BW).to(device), slot_N, place_N, int((starts + counts).max()))
        is_plain = (width == 1 and np.ptp(starts) == 0) or (not starts.any() and np.ptp(counts) == 0)
        position_BW = torch.from_numpy(place_BW.clip(min=0)).to(device)
        output = self._model(
            input_ids=torch.from_numpy(ids_BW).to(device),
            attention_mask=None if is_plain and self._windows == {"all": None} else self._masks(position_BW),
            position_ids=position_BW,
            use_cache=True,
            logits_to_keep=1,
            **{self._argument: self._cache},
        )
        self._tokens[slot_N, place_N] = ids_BW[rows, columns]
        self.lengths[list(slots)] = starts + counts
        self.fed_tokens += int(counts.sum())
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _masks(self, position_BW: Tensor) -> Any:
        """Return what each new token may attend to [B, 1, W, C]: the tokens of its slot up to its own position.

        A model with several kinds of layers gets one mask for each.
        """
        place_C = torch.arange(self._shape.width, device=position_BW.device)
        seen_BWC = place_C <= position_BW[:, :, None]
        masks = {
            kind: self._mask(seen_BWC if window is None else seen_BWC & (place_C > position_BW[:, :, None] - window))
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, seen_BWC: Tensor) -> Tensor:
        mask = seen_BWC[:, None]
        if self._is_eager:  # eager attention adds a mask of numbers to the scores
            dtype = self._model.dtype
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return mask

    def _resize(self, slots: int, capacity: int) -> None:
        before = (len(self), self._shape.capacity)
        after = tuple(
            max(old, -(-new // _GROWTH) * _GROWTH) for old, new in zip(before, (slots, capacity), strict=True)
        )
        if before == after:
            return
        self._shape.slots, self._shape.capacity = after
        tokens: Any = np.zeros(after, dtype=np.int32)
        tokens[: before[0], : before[1]] = self._tokens
        self._tokens = tokens
        self.lengths = np.concatenate([self.lengths, np.zeros(after[0] - before[0], dtype=np.int64)])
        for layer in self._layers:
            layer.resize()


def _windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each kind of layer; None if the layers attend to all tokens.

    Raises:
        UsageError: The model has layers without a KV cache, such as linear attention.
    """
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if kinds is None:
        return {"all": window if getattr(config, "use_sliding_window", True) else None}
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UsageError(f"a model with {unknown[0]} layers has no KV cache and is not supported; name another model")
    if set(kinds) == {"full_attention"}:
        return {"all": None}
    return {"full_attention": None, "sliding_attention": window}


@dataclass(slots=True)
class _Shape:
    """Shared state of the layers of a cache: their size, and the rows of the current forward pass."""

    slots: int = 0
    capacity: int = 0
    width: int = 0
    new: int = 0
    rows: Any = None
    is_real_BW: Any = None
    slot_N: Any = None
    place_N: Any = None

    def begin(self, slots: Sequence[int], is_real_BW: Tensor, slot_N: Any, place_N: Any, width: int) -> None:
        """Begin a pass over `slots` in which a row has at most `width` tokens, cached and new."""
        device = is_real_BW.device
        is_range = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        # A slice reads the slots without a copy.
        self.rows = slice(slots[0], slots[0] + len(slots)) if is_range else torch.tensor(slots, device=device)
        self.is_real_BW, self.width, self.new = is_real_BW, width, is_real_BW.shape[1]
        self.slot_N, self.place_N = torch.from_numpy(slot_N).to(device), torch.from_numpy(place_N).to(device)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer [S, H, C, D]."""

    is_sliding = False

    def __init__(self, shape: _Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._empty(one) for one in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return those of the pass's rows [B, H, C, D]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        shape = self._shape
        found: list[Tensor] = []
        for cached, new in ((self.keys, key_states), (self.values, value_states)):
            cached[shape.slot_N, :, shape.place_N] = new.transpose(1, 2)[shape.is_real_BW]
            found.append(cached[shape.rows, :, : shape.width])
        return found[0], found[1]

    def resize(self) -> None:
        """Follow the size of the cache, and keep what is stored."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (self._grown(one) for one in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._shape.width, 0

    def get_seq_length(self) -> int:
        return self._shape.width - self._shape.new

    def get_max_length(self) -> int:
        return -1

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros(self._shape.slots, heads, self._shape.capacity, width)

    def _grown(self, cached: Tensor) -> Tensor:
        grown = self._empty(cached)
        grown[: cached.shape[0], :, : cached.shape[2]] = cached
        return grown
