"""examples/repair_config.py: an environment of this kind needs nothing of the product but the kit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from envkit.checks.tasks import check_tasks

FILE = Path(__file__).parents[3] / "examples/repair_config.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("repair_config", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register()
    return module


def test_its_oracle_earns_1_and_its_nop_and_cheat_0(example: ModuleType) -> None:
    results, missing = check_tasks("Repair-v0", tasks=2, repeat=1, backend="process")
    assert [line for one in results for line in one.problems()] == []
    assert {one.player: one.successes for one in results} == {"oracle": 2, "nop": 0, "cheat:empty_values": 0}
    assert missing == []
