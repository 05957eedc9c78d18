"""Short names of the keys of an evaluation file. The command line reads them before it loads anything slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Shorthand(NamedTuple):
    """A short name of a key, as an option of ``envkit eval`` and an argument of `envkit.evaluate`."""

    key: str
    metavar: str
    help: str


SHORTHANDS: Mapping[str, Shorthand] = {
    "policy": Shorthand(
        "policy",
        "POLICY",
        "Required with an ENV: random, expert, model:NAME-OR-PATH (a language model in this process), checkpoint:DIR "
        "(a training run), "
        "openai:MODEL@URL (an OpenAI-compatible server), agent:NAME (an agent that is a function, with the language "
        "model of engine.model), a player of the environment (oracle, nop), or NAME or NAME:TEXT for a player of a "
        "package.",
    ),
    "episodes": Shorthand(
        "evaluation.episodes", "COUNT", "Number of tasks; by default 512, or all if there are fewer."
    ),
    "attempts": Shorthand("evaluation.attempts", "COUNT", "Episodes per task; above 1, pass@k is reported too."),
    "split": Shorthand("evaluation.split", "train|validation|eval|any", "Play only tasks of this split."),
    "url": Shorthand("env.url", "URL", "Play on the server (envkit serve) at this address."),
    "temperature": Shorthand("rollout.temperature", "X", "Sampling temperature of a language model; 0 is greedy."),
    "turn_tokens": Shorthand(
        "rollout.turn_tokens", "COUNT", "Maximum tokens per answer; by default 4096 for an endpoint, otherwise 128."
    ),
    "max_turns": Shorthand("rollout.max_turns", "COUNT", "Maximum turns per episode."),
    "system": Shorthand("renderer.system", "TEXT", "System prompt; by default the chat template decides."),
    "seed": Shorthand("evaluation.seed", "SEED", "Seed of the tasks; by default the same as in training files."),
    "backend": Shorthand("sandbox.kind", "auto|local|docker|process", "Sandboxes of an environment with tools."),
    "judge": Shorthand("env.judge", "MODEL@URL", "Judge of an environment that needs one."),
}
"""The short names that the command line and `envkit.evaluate` have."""
