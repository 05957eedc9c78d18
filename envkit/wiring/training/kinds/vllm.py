"""Opens the engine vllm: on servers that it starts, or on running ones. This module imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from envkit import clock
from envkit.config.parts import EngineSection, VllmEngineSection
from envkit.errors import EnvkitError, UsageError
from envkit.http.client.chat import Address
from envkit.protocols import Launcher
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.engines.vllm.launch import (
    SERVED_NAME,
    ServerSettings,
    check_arguments,
    find_python,
    is_built_for_cpus,
)
from envkit.trainer_bridge.engines.vllm.replica import START_TIMEOUT_S, VllmSettings
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.trainer_bridge.models.saved_policy import base_of
from envkit.trainer_bridge.stopping import stop_on_signals
from envkit.types import Place
from envkit.wiring.contexts import EngineContext
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.training import models
from envkit.wiring.training.resolve import has_fast_bfloat16

_JUDGE_TOKENS = 16_384
"""Maximum tokens of a chat with a judge, unless its model has fewer positions."""


def open_vllm(context: EngineContext) -> AbstractAsyncContextManager[VllmEngine]:
    """Return a context manager that starts or connects the servers; see `VllmEngineSection`."""
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
        seeds=section.seeds,
        shares_files=section.weights_folder is not None,
        weights_url=section.weights_url,
    )
    if section.urls:
        return VllmEngine(settings, urls=section.urls, announce=context.announce).running()
    places = context.places or (Place(),) * (section.replicas or 1)
    find = partial(_server_settings, section, model.path, context.max_tokens, context.lora_rank)
    servers = [
        VllmServer(find(place), launcher=context.launcher, place=place, announce=context.announce) for place in places
    ]
    return VllmEngine(settings, servers=servers, announce=context.announce).running()


def problems(section: VllmEngineSection) -> list[str]:
    """Return what is wrong with the section, as lines that start with a key."""
    found = []
    if section.model is None:
        found.append("engine.model: the engine vllm needs a model; name one")
    elif base_of(Path(section.model)) is not None:
        found.append("engine.model: the engine vllm cannot start from a LoRA adapter yet; use the engine transformers")
    if section.weights_url is not None:
        if not _is_plain(section.weights_url, schemes=("http",)) or urlsplit(section.weights_url).port is None:
            found.append(f"engine.weights_url: must be like http://10.0.0.5:8300, got {section.weights_url!r}")
        if section.weights_folder is not None:
            found.append("engine.weights_url: has no effect beside engine.weights_folder; leave one of them out")
    if section.url is not None:
        found += [
            f"engine.url: must be like http://127.0.0.1:8100, without a path, got {url!r}"
            for url in section.urls or ("",)
            if not _is_plain(url, schemes=("http", "https"))
        ]
        started = {"python", "replicas", "gpu_memory_utilization", "arguments"}
        if without_effect := sorted(started & section.model_fields_set):
            found.append(f"engine.{without_effect[0]}: has no effect on running servers (engine.url); leave it out")
        return found
    try:
        is_built_for_cpus(find_python(section.python))
    except UsageError as error:
        found.append(f"engine.python: {error.detail}")
    try:
        check_arguments(section.arguments)
    except UsageError as error:
        found.append(f"engine.arguments: {error.detail}")
    return found


def _is_plain(url: str, *, schemes: Sequence[str]) -> bool:
    """Whether a URL has one of the schemes, a host and a valid port, if any, and no path."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and parts.hostname is not None and parts.port != 0 and not parts.path.strip("/")
    except ValueError:
        return False


async def run_server(
    section: VllmEngineSection,
    *,
    port: int,
    max_tokens: int,
    lora_rank: int,
    announce: Callable[[str], object],
    on_ready: Callable[[str], object],
) -> None:
    """Run a server of an engine section until SIGINT or SIGTERM; `on_ready` receives its URL.

    It has the GPUs of CUDA_VISIBLE_DEVICES, and uses one unless section.arguments has tensor-parallel-size. Raises
    `UsageError` if it does not start, or ends by itself.
    """
    model = await clock.to_thread(models.locate, section.model or "")
    settings = await clock.to_thread(_server_settings, section, model, max_tokens, lora_rank, Place())
    server = VllmServer(settings, launcher=LocalLauncher(), port=port, announce=announce)
    try:
        with anyio.CancelScope() as scope, stop_on_signals(scope.cancel):
            await server.start(START_TIMEOUT_S)
            on_ready(server.url)
            raise UsageError(f"the vLLM server ended: {await server.wait_ended()}; its log is {server.log}")
    finally:
        await server.stop()


@asynccontextmanager
async def judge_server(
    model: str, section: EngineSection, launcher: Launcher, place: Place, announce: Callable[[str], None]
) -> AsyncIterator[Address]:
    """Serve the model of a judge, named as in `engine.model`, during the block; yield its address, which may change.

    A server that ends is started again at another port, as often as one of the engine. It has the interpreter and the
    number format of `section`, the section ``engine``, if its kind is vllm.

    Raises:
        UsageError: There is no such model, no interpreter has vllm, or the server does not start.
        ExceptionGroup: With an `EnvkitError`, which also cancels the block: the server is not started again.
    """
    shared = {key: getattr(section, key) for key in ("python", "dtype") if isinstance(section, VllmEngineSection)}
    own, path = VllmEngineSection(**shared), await clock.to_thread(models.locate, model)
    max_tokens = min(models.positions_of(model) or _JUDGE_TOKENS, _JUDGE_TOKENS)
    found = await clock.to_thread(_server_settings, own, path, max_tokens, 0, place)
    server = VllmServer(found, launcher=launcher, place=place, announce=announce)
    settings = VllmSettings(max_tokens=max_tokens, max_num_seqs=found.max_num_seqs, dtype=found.dtype, model=model)
    engine = VllmEngine(settings, servers=[server], announce=announce)
    async with engine.running(), clock.background_tasks() as tasks:
        address = Address(SERVED_NAME, f"{engine.urls[0]}/v1", is_own=True)

        async def follow() -> None:
            while True:
                try:
                    await engine.changed()
                except EnvkitError as error:
                    raise EnvkitError(f"the judge is lost: {error}") from None
                address.url = f"{engine.urls[0]}/v1"

        tasks.start_soon(follow)
        yield address


def _server_settings(
    section: VllmEngineSection, model: str, max_tokens: int, lora_rank: int, place: Place
) -> ServerSettings:
    """Return the settings of a server. It has the number format of a run's engine, also if that is not resolved."""
    fastest = "bfloat16" if section.dtype == "auto" and has_fast_bfloat16("auto") else "float32"
    return ServerSettings(
        python=find_python(section.python),
        model=model,
        dtype=fastest if section.dtype == "auto" else section.dtype,
        max_model_len=max_tokens,
        max_num_seqs=section.max_num_seqs,
        lora_rank=lora_rank,
        gpu_memory_utilization=section.gpu_memory_utilization,
        num_gpus=len(place.gpus or ()) or 1,
        arguments=section.arguments,
    )
