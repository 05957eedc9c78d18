"""The models beside the policy: the critics, which estimate the value of each turn, and the reference policy.

Axes: B samples, L tokens, N turns of all samples.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from envkit.types import Sample

from .algorithm import Algorithm


def copy_of(module: Any) -> Any:
    """Return a copy of `module` that shares its frozen weights, such as those beside a LoRA adapter."""
    frozen = {id(weight): weight for weight in module.parameters() if not weight.requires_grad}
    return copy.deepcopy(module, {**frozen})


class Critic(nn.Module):
    """Estimates the return from a turn onwards, given all tokens before the turn's completion.

    It starts with a copy of the body of `model` (see `copy_of`). With `of_tokens`, it estimates the return from each
    policy token onwards instead, given all tokens before it.
    """

    def __init__(self, model: Any, *, of_tokens: bool = False) -> None:
        super().__init__()
        self._of_tokens = of_tokens
        self.body = copy_of(model.base_model)
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=model.device)  # float32, also beside a frozen bfloat16 body
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples: Sequence[Sample], *, ends: bool = False) -> Tensor:
        """Return the estimated value of each turn that has a completion, or of each token, sample by sample [N].

        With `ends`, each sample has one more value: after its last policy token.
        """
        device = self.head.weight.device
        longest = max(len(sample.token_ids) for sample in samples)
        ids = np.stack([np.pad(sample.token_ids, (0, longest - len(sample.token_ids))) for sample in samples])
        hidden_BLH = self.body(
            input_ids=torch.from_numpy(ids).to(device, torch.long), use_cache=False
        ).last_hidden_state
        starts = [[*self._places(sample), *(np.flatnonzero(sample.mask)[-1:] if ends else ())] for sample in samples]
        rows = [row for row, positions in enumerate(starts) for _ in positions]
        columns = [position for positions in starts for position in positions]
        # Compute the value without autocast, because bfloat16 has a precision of only three decimal digits.
        with torch.autocast(device.type, enabled=False):
            value: Tensor = self.head(hidden_BLH[rows, columns].to(self.head.weight.dtype)).squeeze(-1).float()
        return value

    def estimates(self, sample: Sample) -> int:
        """Return the number of values of a sample."""
        return len(self._places(sample))

    def _places(self, sample: Sample) -> list[int]:
        """Return the positions directly before what it estimates."""
        starts = np.flatnonzero(sample.mask) if self._of_tokens else _completion_starts(sample)
        places: list[int] = (starts - 1).tolist()
        return places


def critics_and_reference(model: Any, algorithm: Algorithm, teacher: Any) -> tuple[list[Critic], Any]:
    """Return the critics, and the reference policy or None, of an algorithm.

    They start from the weights of `model`, unless the reference is a `teacher`. All critics are equal at first, with
    value 0: they differ once they learn from different targets.
    """
    reference = None
    if algorithm.needs_reference:
        reference = copy_of(model).eval() if teacher is None else teacher
    with torch.random.fork_rng(devices=[]):  # the head is drawn before it is set to 0
        return [Critic(model, of_tokens="token_values" in algorithm.needs) for _ in range(algorithm.critics)], reference


def policy_turns(sample: Sample) -> list[int]:
    """Return the indices of the sample's turns that have a completion, in order."""
    turns: list[int] = sample.turn_ids[_completion_starts(sample)].tolist()
    return turns


def _completion_starts(sample: Sample) -> NDArray[np.int64]:
    """Return the position of the first token of each completion."""
    own = np.flatnonzero(sample.mask)
    _, first = np.unique(sample.turn_ids[own], return_index=True)
    return own[first]
