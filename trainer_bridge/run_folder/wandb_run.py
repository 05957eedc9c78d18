"""Metrics for Weights & Biases, with all local files in the folder of the run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import wandb
import wandb.errors

from envkit.errors import UsageError
from envkit.runs.files import replace, writing
from envkit.types import JSON

_ID = "envkit-run-id"


class WandbRun:
    """A run of Weights & Biases; implements `envkit.protocols.Tracker`.

    Its settings are wandb's own environment variables, such as ``WANDB_PROJECT`` and ``WANDB_MODE``; by default, the
    project is envkit, and the run has the name of its folder. wandb's service, a process of its own, writes and uploads
    the metrics. It ends at `close`, and within seconds after the death of this process.

    Args:
        folder: The existing folder of the training run. Its subfolder ``wandb`` holds the files and the id of the run.
        first_step: First train step that will be recorded. 0 starts a new run; another step continues the run whose id
            is in `folder`, or starts one if the folder has no id.
        config: Configuration of the training run.

    Raises:
        UsageError: wandb refuses to start the run, as without an API key, or the folder cannot be written.
    """

    def __init__(self, folder: Path, *, first_step: int, config: Mapping[str, JSON]) -> None:
        folder = folder.resolve()
        id_file = folder / "wandb" / _ID
        with writing(id_file):
            id_file.parent.mkdir(exist_ok=True)
            if first_step == 0 or not id_file.exists():
                replace(id_file, secrets.token_hex(4).encode())
            run_id = id_file.read_text(encoding="utf-8")
        try:
            with _service_settings(id_file.parent):
                self._run = wandb.init(
                    id=run_id,
                    resume="allow",
                    reinit="create_new",  # leaves a run of the caller's own alone
                    project=os.environ.get("WANDB_PROJECT", "envkit"),
                    name=os.environ.get("WANDB_NAME", folder.name),
                    config=dict(config),
                    dir=folder,
                    settings=wandb.Settings(console="off", silent=True, symlink=False),
                )
        except (wandb.errors.Error, TimeoutError) as error:
            remedy = "run `wandb login`, or set WANDB_MODE=offline"
            raise UsageError(f"wandb did not start a run: {error}; {remedy}") from error
        # Steps of our own, since wandb's step counts the calls of `log`.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a train step, as ``train/name``."""
        self._run.log({"step": step, **{f"train/{name}": value for name, value in values.items()}})

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation, as ``evaluation/name``."""
        self._run.log({"step": step, **{f"evaluation/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """Finish the run; in the mode online, this waits until its metrics are uploaded."""
        self._run.finish()
        if wandb.run is None:  # nothing else in this process uses wandb's service
            wandb.teardown()


@contextmanager
def _service_settings(folder: Path) -> Iterator[None]:
    """Set the settings that wandb's service reads only from the environment, where the user has not set them.

    The service keeps its own log in `folder` instead of the home directory. It reports its errors to wandb's makers
    only if the run uploads anything.
    """
    settings = {"WANDB_CACHE_DIR": str(folder / "cache")}
    if os.environ.get("WANDB_MODE", "online") != "online":
        settings["WANDB_ERROR_REPORTING"] = "false"
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
