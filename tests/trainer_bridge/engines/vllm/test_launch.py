"""The command line and environment of a vLLM server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from envkit.errors import UsageError
from envkit.trainer_bridge.engines.vllm.launch import PLUGIN, Arguments, ServerSettings, command, environment

SETTINGS = ServerSettings(
    python="/venv/bin/python", model="org/name", dtype="bfloat16", max_model_len=2048, max_num_seqs=16
)


def words(settings: ServerSettings, *, on_cpu: bool = True) -> list[str]:
    return command(settings, host="127.0.0.1", port=8100, on_cpu=on_cpu)


def value(settings: ServerSettings, option: str, *, on_cpu: bool = True) -> str:
    found = words(settings, on_cpu=on_cpu)
    return found[found.index(option) + 1]


def test_the_server_samples_token_ids_and_reports_the_log_probs_of_the_sampling_distribution() -> None:
    assert words(SETTINGS)[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert "--enable-scale-out" in words(SETTINGS)
    assert value(SETTINGS, "--logprobs-mode") == "processed_logprobs"
    assert value(SETTINGS, "--weight-transfer-config") == '{"backend":"envkit_file"}'
    assert (value(SETTINGS, "--host"), value(SETTINGS, "--port")) == ("127.0.0.1", "8100")
    assert (value(SETTINGS, "--max-model-len"), value(SETTINGS, "--max-num-seqs")) == ("2048", "16")


def test_a_cpu_neither_compiles_nor_gets_options_of_a_gpu() -> None:
    variables = environment(SETTINGS, {"VLLM_CPU_KVCACHE_SPACE": "3"}, on_cpu=True)
    assert (variables["TORCH_COMPILE_DISABLE"], variables["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "3")
    assert "--enforce-eager" in words(SETTINGS)
    assert "--gpu-memory-utilization" not in words(SETTINGS)


def test_a_cpu_never_splits_a_prompt_which_would_kill_the_engine() -> None:
    assert "--no-enable-chunked-prefill" in words(SETTINGS)
    assert value(SETTINGS, "--max-num-batched-tokens") == "4096"
    assert value(replace(SETTINGS, max_model_len=8192), "--max-num-batched-tokens") == "8192"
    assert "--no-enable-chunked-prefill" not in words(SETTINGS, on_cpu=False)


def test_a_gpu_compiles_and_a_server_on_two_uses_tensor_parallelism() -> None:
    two = replace(SETTINGS, num_gpus=2, gpu_memory_utilization=0.4)
    assert "TORCH_COMPILE_DISABLE" not in environment(two, {}, on_cpu=False)
    assert value(two, "--tensor-parallel-size", on_cpu=False) == "2"
    assert value(two, "--gpu-memory-utilization", on_cpu=False) == "0.4"
    assert "--enforce-eager" not in words(two, on_cpu=False)
    assert "--tensor-parallel-size" not in words(SETTINGS, on_cpu=False)


@pytest.mark.parametrize(("rank", "passed"), [(1, "8"), (9, "16"), (512, "512")])
def test_a_lora_rank_is_rounded_up_to_one_that_vllm_supports(rank: int, passed: str) -> None:
    settings = replace(SETTINGS, lora_rank=rank)
    assert value(settings, "--max-lora-rank") == passed
    assert environment(settings, {}, on_cpu=True)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_without_adapters_there_is_no_lora_and_above_the_highest_rank_it_is_refused() -> None:
    assert "--enable-lora" not in words(SETTINGS)
    with pytest.raises(UsageError, match="LoRA rank 513 is too high; vLLM supports ranks up to 512"):
        replace(SETTINGS, lora_rank=513)


def test_the_plugin_is_on_the_path_instead_of_the_packages_of_envkit() -> None:
    variables = environment(SETTINGS, {"PYTHONPATH": "/mine", "PATH": "/bin"}, on_cpu=True)
    assert variables["PYTHONPATH"] == str(PLUGIN)
    assert variables["PATH"] == "/venv/bin:/bin"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"


def test_only_a_model_folder_is_served_without_the_hub(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" not in environment(SETTINGS, {}, on_cpu=True)
    assert environment(replace(SETTINGS, model=str(tmp_path)), {}, on_cpu=True)["HF_HUB_OFFLINE"] == "1"


def test_the_users_arguments_come_last() -> None:
    arguments: Arguments = {"max_num_batched_tokens": 8192, "enable-prefix-caching": False, "async-scheduling": True}
    found = words(replace(SETTINGS, arguments=arguments))
    assert found[-3:] == ["--max-num-batched-tokens=8192", "--no-enable-prefix-caching", "--async-scheduling"]


def test_two_starts_draw_different_random_numbers() -> None:
    assert len({value(SETTINGS, "--seed") for _ in range(4)}) > 1


def test_several_tokens_arrive_at_once_unless_the_user_chooses_another_number() -> None:
    for on_cpu, interval in ((False, "32"), (True, "8")):
        found = words(replace(SETTINGS, arguments={"stream-interval": 1}), on_cpu=on_cpu)
        assert found[found.index("--stream-interval") + 1] == interval
        assert found[-1] == "--stream-interval=1"  # the last one counts


@pytest.mark.parametrize("name", ["--port", "max_model_len", "no-enable-scale-out"])
def test_an_argument_that_envkit_sets_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"the vLLM argument {name} is reserved"):
        replace(SETTINGS, arguments={name: "1"})
