"""Calls functions of verl and TRL with numbers from standard input, and writes what they return as JSON.

A program for the virtual environment of these projects (``make peers``), where envkit is not installed. The input has
`cases` and `rows`; a row is a project, a function, its settings and the name of a case. A case has the numbers of B
rollouts, padded to L tokens [B, L]. The output has the `versions` of the projects and for each row the `results`: lists
with a number for each token whose mask is 1, rollout by rollout.

The losses of single tokens cannot be had from these functions, which return a mean. They are the derivative of that
mean with respect to the weights that correct for the sampler, at 1.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl.trainer.grpo_trainer as trl_grpo  # type: ignore[import-not-found]
import verl.trainer.ppo.core_algos as verl_core  # type: ignore[import-not-found]
import verl.trainer.ppo.rollout_corr_helper as verl_correction  # type: ignore[import-not-found]
from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor
from verl.trainer.config import AlgoConfig  # type: ignore[import-not-found]
from verl.workers.config import ActorConfig, PolicyLossConfig  # type: ignore[import-not-found]

Case = dict[str, Any]
Result = dict[str, Tensor]


def _verl_advantage(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    """Call one of verl's advantages with those of its arguments that a case or the settings have."""
    mask_BL = case["mask"].long()
    given = {
        "token_level_rewards": case["reward"],
        "response_mask": mask_BL,
        "index": np.array(case["groups"], dtype=object),
        "values": case["value"],
        "non_tensor_batch": case["named"],
        "batch": {"prompts": mask_BL[:, :0], "attention_mask": torch.ones_like(mask_BL)},
        "config": AlgoConfig(**{key: value for key, value in settings.items() if key != "lam"}),
        **settings,
    }
    names = inspect.signature(function).parameters
    advantage_BL, return_BL = function(**{name: given[name] for name in names if name in given})
    return {"value": advantage_BL, "targets": return_BL}


def _verl_loss(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    of_policy_loss = {key: settings[key] for key in settings if hasattr(PolicyLossConfig, key)}
    others = {key: settings[key] for key in settings if key not in (*of_policy_loss, "loss_agg_mode")}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(**of_policy_loss), **others
    )
    logp_BL, weight_BL = case["logp"].requires_grad_(), torch.ones_like(case["logp"]).requires_grad_()
    loss, _ = function(
        *(case["old"], logp_BL, case["advantage"], case["mask"]),
        loss_agg_mode=settings.get("loss_agg_mode", "token-sum"),
        config=config,
        rollout_is_weights=weight_BL,
    )
    return _derivatives(loss, logp_BL, weight_BL)


def _derivatives(loss: Tensor, logp_BL: Tensor, weight_BL: Tensor) -> Result:
    gradient_BL, value_BL = torch.autograd.grad(loss, [logp_BL, weight_BL])
    return {"value": value_BL, "gradient": gradient_BL}


def _verl_aggregation(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    loss_BL = torch.zeros_like(case["mask"]).requires_grad_()
    (weight_BL,) = torch.autograd.grad(function(loss_BL, case["mask"], **settings), loss_BL)
    return {"value": weight_BL}


def _verl_kl(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    logp_BL = case["logp"].requires_grad_()
    value_BL = function(logp_BL, case["reference"], **settings)
    return {"value": value_BL, "gradient": torch.autograd.grad((value_BL * case["mask"]).sum(), logp_BL)[0]}


def _verl_correction(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    return {"value": function(case["old"] - case["sampled"], case["mask"], **settings)[0]}


def _trl_trainer(settings: Mapping[str, Any], case: Case, group_size: int) -> Any:
    """Return TRL's trainer with these settings, without a model and an engine."""
    rows, length = case["mask"].shape
    config = trl_grpo.GRPOConfig(
        output_dir=gettempdir(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=rows,
        num_generations=group_size,
        use_vllm=True,
        max_completion_length=length,
        **settings,
    )
    trainer = object.__new__(trl_grpo.GRPOTrainer)
    names = sorted(case["named"]) or ["return"]
    attributes = {
        **vars(config),  # most attributes have the names of their keys
        "args": config,
        "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "reward_func_names": names,
        "reward_funcs": names,
        "reward_weights": torch.tensor(config.reward_weights or [1.0] * len(names)),
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_metrics": {"train": defaultdict(list)},
        "_logs": {name: defaultdict(list) for name in ("rewards", "extra")} | defaultdict(list),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    return trainer


def _trl_loss(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    logp_BL, weight_BL = case["logp"].requires_grad_(), torch.ones_like(case["logp"]).requires_grad_()
    trainer = _trl_trainer(settings, case, len(case["groups"]))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp_BL, case["entropy"], None)
    ids_BL = torch.zeros_like(case["mask"]).long()
    inputs = {
        "prompt_ids": ids_BL[:, :0],
        "prompt_mask": ids_BL[:, :0],
        "completion_ids": ids_BL,
        "completion_mask": torch.ones_like(ids_BL),
        "tool_mask": case["mask"].long(),
        "advantages": case["advantage"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["reference"],
        "importance_sampling_ratio": weight_BL,
        "num_items_in_batch": case["mask"].sum(),
    }
    return _derivatives(function(trainer, None, inputs), logp_BL, weight_BL)


def _trl_scores(function: Callable[..., Any], settings: dict[str, Any], case: Case) -> Result:
    """Return what TRL makes of completions, beside their tokens: advantages, and the corrections of the sampler."""
    trainer = _trl_trainer(settings, case, len(case["groups"]) // len(set(case["groups"])))
    mask_BL, rows = case["mask"].long(), len(case["mask"])
    reward_RB = [case["named"][name] for name in sorted(case["named"])] or [case["reward"].sum(1).tolist()]
    ids = [[0] * mask_BL.shape[1]] * rows
    sampled = case["sampled"].tolist()
    trainer._generate = lambda prompts: (ids, ids, mask_BL.tolist(), ids, sampled, {}, None, None)
    trainer._calculate_rewards = lambda *_: torch.tensor(reward_RB, dtype=torch.float64).T
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (case["old"], case["entropy"], None)
    made = function(trainer, [{"prompt": ""}] * rows)
    return {
        "value": made["advantages"][:, None].expand_as(mask_BL),
        "correction": made["importance_sampling_ratio"].expand_as(mask_BL),
    }


_ADAPTERS: Mapping[str, Callable[[Callable[..., Any], dict[str, Any], Case], Result]] = {
    "compute_policy_loss": _verl_loss,
    "compute_rollout": _verl_correction,
    "compute": _verl_advantage,
    "agg_loss": _verl_aggregation,
    "kl_penalty": _verl_kl,
    "_compute_loss": _trl_loss,
    "_generate_and_score_completions": _trl_scores,
}
"""By the beginning of a function's name; the first one that fits."""
_PLACES = (verl_core, verl_correction, trl_grpo.GRPOTrainer)


def _called(name: str, settings: dict[str, Any], case: Case) -> dict[str, list[list[float]]]:
    function = next(found for place in _PLACES if (found := getattr(place, name, None)) is not None)
    adapter = next(one for start, one in _ADAPTERS.items() if name.startswith(start))
    tables = {key: torch.tensor(case[key], dtype=torch.float64) for key in case if key not in ("groups", "named")}
    result = adapter(function, settings, {**case, **tables})
    own = tables["mask"].bool()
    return {key: [row[kept].tolist() for row, kept in zip(table, own, strict=True)] for key, table in result.items()}


def main() -> None:
    request, output = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # the projects may print
    results = [_called(name, settings, request["cases"][case]) for name, settings, case in request["rows"]]
    print(json.dumps({"versions": {name: version(name) for name in ("verl", "trl")}, "results": results}), file=output)


if __name__ == "__main__":
    main()
