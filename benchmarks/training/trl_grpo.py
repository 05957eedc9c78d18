"""GRPO by TRL's own trainer, in a virtual environment without envkit; `evidence/language_model.py` starts it.

The command line is a JSON object with the settings. The program trains, saves the policy after chosen train steps, and
writes the seconds of training until each of these steps, without the time for saving.
"""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_NUMBER = re.compile(r"-?\d+")


def right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Return reward 1 for each completion whose last number equals the expected `answer`, otherwise 0."""
    texts = [one[0]["content"] for one in completions]
    numbers = [_NUMBER.findall(text) for text in texts]
    return [float(bool(found) and int(found[-1]) == wanted) for found, wanted in zip(numbers, answer, strict=True)]


class Saver(TrainerCallback):
    """Saves the policy after chosen train steps, and measures the training time."""

    def __init__(self, folder: Path, after: list[int]) -> None:
        self._folder = folder
        self._after = after
        self._began = 0.0
        self.seconds: dict[int, float] = {}
        self._excluded = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if state.global_step in self._after:
            self.seconds[state.global_step] = now - self._began - self._excluded
            place = self._folder / f"step-{state.global_step}"
            kwargs["model"].save_pretrained(place)
            kwargs["processing_class"].save_pretrained(place)
            self._excluded += time.monotonic() - now


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    folder = Path(settings["output"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(settings["tasks"]).read_text().splitlines()]
    saver = Saver(folder, settings["save_after"])
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["rows_a_pass"],
        gradient_accumulation_steps=settings["passes"],
        num_generations=settings["group_size"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["schedule"],
        adam_beta2=0.95,
        max_completion_length=settings["turn_tokens"],
        temperature=1.0,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=settings["seed"],
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[saver],
    )
    trainer.train()
    (folder / "seconds.json").write_text(json.dumps(saver.seconds))
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
