"""The engines, with one model for all tests of this folder, which run in one process for each kind of engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engines.rigs import Policies, Rig, TransformersRig, VllmRig, write_six_layers
from tests.contract.engines.vllm_server import VllmProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)
            name = "vllm" if item.get_closest_marker("vllm") else "transformers"
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.path.name == "test_vllm_killed.py")  # it ends the server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        kinds = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
        metafunc.parametrize("rig", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def model_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model of all engines."""
    return write_six_layers(smollm2, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def policies(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(model_folder, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def vllm_process(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    process = VllmProcess(model_folder, tmp_path_factory.mktemp("vllm") / "log")
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def vllm_rig(policies: Policies, vllm_process: VllmProcess) -> VllmRig:
    return VllmRig(policies, vllm_process)


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest, policies: Policies, model_folder: Path) -> Rig:
    """An engine of each kind."""
    if request.param == "transformers":
        return TransformersRig(policies, model_folder)
    found: VllmRig = request.getfixturevalue("vllm_rig")
    return found
