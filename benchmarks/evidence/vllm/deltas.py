"""Measure how many bytes of SmolLM2-135M in bfloat16 a server on another machine fetches after an update.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/deltas.py

The trainer makes GRPO updates with AdamW at the default learning rate of a pretrained model, 1e-6, and publishes after
each. The files pass through HTTP to the plug-in of vLLM, without a server, and are compared by their SHA-256. ``sent``
is the share of the bytes. ``offer_s`` is the time for the checksum and the delta in the run, ``fetch_s`` that of the
plug-in. Takes two minutes.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import torch
from parts import chat_prompts, load, model_folder, sample_of, trainer
from record import Evidence, parser

from envkit import clock
from envkit.trainer_bridge.engines.vllm.plugin.envkit_fetch import Store
from envkit.trainer_bridge.weights.served import WeightServer
from envkit.types import Completion, FinishReason, Sample, floats, ints

Figures = dict[str, Any]

NAME = "weight-deltas"
STALE_AFTER = ("trainer_bridge/engines/vllm/plugin", "trainer_bridge/trainers/learner.py", "trainer_bridge/weights")
TWIN = "tests/trainer_bridge/weights/test_served.py::test_a_hundred_pushes_arrive_bit_for_bit_as_deltas"
AT_MOST = 0.15
PROMPTS = (
    "What is 17 + 25?",
    "Name three rivers of Europe.",
    "Write a sentence about the sea.",
    "Is 91 a prime number?",
)
ANSWERS = ("I do not know.", "Let me think about this step by step, and then answer the question.")


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--updates", type=int, default=5, help="number of updates")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    figures = evidence.part("pushes", lambda: anyio.run(pushes, options.updates))
    sent = [one["sent"] for one in figures["pushes"][1:]]
    evidence.part(
        "claims",
        lambda: {"highest share sent": max(sent), f"at most {AT_MOST}": max(sent) <= AT_MOST, "updates": len(sent)},
    )


async def pushes(updates: int) -> Figures:
    """Return the bytes and seconds of the first push, and of one after each update."""
    found: Figures = {"pushes": []}
    memory = "/dev/shm"
    with TemporaryDirectory(dir=memory) as here, TemporaryDirectory(dir=memory) as there:
        learning = trainer(load(model_folder()), Path(here), engine_dtype="bfloat16")
        server, store, batch = WeightServer(), Store(Path(there)), samples()
        for number in range(updates + 1):
            if number:
                await learning.accumulate(batch)
                await learning.update()
            weights = await learning.publish()
            began = clock.stopwatch()
            url = await server.offer(weights, "http://127.0.0.1:1")
            offered = clock.stopwatch()
            fetched = await clock.to_thread(store.fetch, url)
            ended = clock.stopwatch()
            files = (Path(weights.location), Path(fetched["path"]) / "model.safetensors")
            assert len({sha256(file.read_bytes()).digest() for file in files}) == 1
            size = files[0].stat().st_size
            one = {
                "bytes": size,
                "sent": fetched["bytes"] / size,
                "offer_s": offered - began,
                "fetch_s": ended - offered,
            }
            found["pushes"].append({key: round(value, 4) for key, value in one.items()})
            print(found["pushes"][-1], flush=True)
        await server.close()
    return found


def samples() -> list[Sample]:
    """Return two answers to each prompt, of which the second is right."""
    folder = model_folder()
    answers = chat_prompts(folder, ANSWERS)
    made = []
    for number, prompt in enumerate(chat_prompts(folder, PROMPTS)):
        for index, answer in enumerate(answers):
            completion = Completion(ints(answer), floats([-2.0] * len(answer)), FinishReason.STOP, ((0, len(answer)),))
            made.append(sample_of(prompt, completion, episode=f"{number}-{index}", reward=float(index)))
    return made


if __name__ == "__main__":
    main()
