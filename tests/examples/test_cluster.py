"""The recipes for many machines: docker/compose.yaml, docker/fleet and examples/cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from envkit.config import serving, training
from tests.docs.test_commands import parse
from tests.e2e.fleet.fleet import serving as served

ROOT = Path(__file__).parents[2]
FLEET, CLUSTER = ROOT / "docker/fleet", ROOT / "examples/cluster"


def manifests() -> Iterator[dict[str, Any]]:
    for file in sorted(CLUSTER.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


def containers() -> Iterator[dict[str, Any]]:
    """Yield the services of the compose file, and the containers of the manifests, that run the image of envkit."""
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    yield from (one for one in compose["services"].values() if "envkit" in one["image"])
    for one in manifests():
        spec = one.get("spec", {}).get("template", {}).get("spec", {})
        yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def commands() -> Iterator[list[str]]:
    """Yield the commands of envkit in the recipes, without the word ``envkit``."""
    scripts = [(FLEET / "make-tokens").read_text(), (CLUSTER / "slurm.sh").read_text()]
    for one in containers():
        command = one.get("args") or one.get("command") or ["sh", ""]
        if command[0] == "sh":
            scripts.append(command[-1])
        else:
            yield command
    for text in re.findall(r'(?:"\$envkit"|\benvkit) ((?:serve|token|train) [^>|\\&]*)', "\n".join(scripts)):
        yield text.replace('"$@"', "FILE").replace('"', "").split()


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_each_command_of_the_recipes_can_be_parsed(words: list[str]) -> None:
    parse([re.sub(r"\$\w+", "20000", word) for word in words])


def test_the_server_files_of_the_recipes_are_valid(tmp_path: Path) -> None:
    maps = [one["data"] for one in manifests() if one["kind"] == "ConfigMap"]
    files = [(FLEET / "gateway.yaml").read_text(), *(data["fleet.yaml"] for data in maps if "fleet.yaml" in data)]
    for text in files:
        (tmp_path / "fleet.yaml").write_text(text)
        config = serving.read(tmp_path / "fleet.yaml", [], {})
        assert (config.backend, config.listen.host) == ("nodes", "0.0.0.0")
    assert len(files) == 2


def test_the_training_file_of_the_recipe_for_kuberay_is_valid_and_its_servers_are_on_the_workers() -> None:
    (text,) = (one["data"]["train.yaml"] for one in manifests() if "train.yaml" in one.get("data", {}))
    run = training.parse(yaml.safe_load(text))
    (job,) = (one for one in manifests() if one["kind"] == "RayJob")
    workers = sum(group["replicas"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"])
    assert run.placement.engines == [f"n{number}:0" for number in range(1, workers + 1)]


def test_the_files_that_the_compose_file_mounts_exist() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    mounts = [mount.partition(":")[0] for one in compose["services"].values() for mount in one.get("volumes", ())]
    files = {mount for mount in mounts if mount.startswith("./")}
    assert {f"./fleet/{path.name}" for path in FLEET.iterdir()} == files | {"./fleet/Dockerfile"}
    assert {mount for mount in mounts if not mount.startswith("./")} == set(compose["volumes"])


def test_the_slurm_script_has_no_syntax_errors() -> None:
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=True)


def test_the_manifests_follow_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for one in manifests():
        if one["kind"] != "RayJob":  # a custom resource of KubeRay
            validate.validate(one, "1.30", strict=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", FLEET / "rules.yml"], check=True)


@pytest.mark.slow
def test_dashboard_and_rules_use_only_metrics_that_a_server_has(tmp_path: Path) -> None:
    panels = json.loads((FLEET / "dashboard.json").read_text())["panels"]
    groups = yaml.safe_load((FLEET / "rules.yml").read_text())["groups"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [rule["expr"] for group in groups for rule in group["rules"]]
    used = {name for query in queries for name in re.findall(r"\benvkit_\w+", query)}
    with served("process", tmp_path, "envs.sandboxes=1", "envs.warm=0") as gateway:
        text = httpx.get(f"{gateway.url}/metrics").text
    # A metric with labels has values only when there are some, but always a line with its type.
    assert used <= set(re.findall(r"^(?:# TYPE )?(envkit_\w+)", text, re.MULTILINE))
    assert {"envkit_step_seconds_bucket", "envkit_sandboxes_lost_total", "envkit_sandboxes_wanted"} <= used
