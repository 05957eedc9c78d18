"""Opens the engine vllm: on servers that it starts, or on running ones. This module imports neither torch nor vllm."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from envkit.config.parts import VllmEngineSection
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.engines.vllm.interpreter import find_python
from envkit.trainer_bridge.engines.vllm.launch import ServerSettings
from envkit.trainer_bridge.engines.vllm.replica import VllmSettings
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.wiring.contexts import EngineContext


def open_vllm(context: EngineContext) -> AbstractAsyncContextManager[VllmEngine]:
    """Return a context manager that starts or connects the servers; see `VllmEngineSection`.

    Raises:
        UsageError: The training file names no model, or no interpreter has vllm.
    """
    section, model = context.section, context.model
    assert isinstance(section, VllmEngineSection)
    if model is None:
        raise UsageError("engine.model: the engine vllm needs a model; name one")
    settings = VllmSettings(
        max_tokens=context.max_tokens,
        max_num_seqs=section.max_num_seqs,
        dtype=section.dtype,
        model=Path(model.path).name,
        takes_adapters=context.lora_rank > 0,
        start_timeout_s=section.start_timeout_s,
        stall_timeout_s=section.stall_timeout_s,
        max_restarts=section.max_restarts,
    )
    if section.urls:
        return VllmEngine(settings, urls=section.urls, announce=context.announce).running()
    python = find_python(section.python)
    servers = [
        partial(
            VllmServer,
            ServerSettings(
                python=python,
                model=model.path,
                dtype=section.dtype,
                max_model_len=context.max_tokens,
                max_num_seqs=section.max_num_seqs,
                lora_rank=context.lora_rank,
                kv_cache_gib=section.kv_cache_gib,
                gpu_memory_utilization=section.gpu_memory_utilization,
                gpus=section.gpus[index] if section.gpus else "",
                arguments=section.arguments,
            ),
            announce=context.announce,
        )
        for index in range(section.replicas)
    ]
    return VllmEngine(settings, servers=servers, announce=context.announce).running()


def problems(section: VllmEngineSection) -> list[str]:
    """Return what is wrong with the section, as lines that start with a key."""
    found = []
    if section.model is None:
        found.append("engine.model: the engine vllm needs a model; name one")
    if section.transfer != "file":
        found.append(f"engine.transfer: {section.transfer} is not supported yet: it was never run on a GPU; use file")
    if section.sleep:
        found.append("engine.sleep: not supported yet: it was never run on a GPU; use false")
    if section.gpus and len(section.gpus) != section.replicas:
        found.append(f"engine.gpus: {len(section.gpus)} entries for {section.replicas} replicas; give each replica one")
    if section.urls:
        started = {"python", "replicas", "gpus", "kv_cache_gib", "gpu_memory_utilization", "arguments"}
        if without_effect := sorted(started & section.model_fields_set):
            found.append(f"engine.{without_effect[0]}: has no effect on running servers (engine.url); leave it out")
        return found
    try:
        find_python(section.python)
    except UsageError as error:
        found.append(f"engine.python: {error.detail}")
    return found
