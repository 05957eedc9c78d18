"""How the optimiser moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How the optimiser moves.

    Attributes:
        learning_rate: AdamW's step size for the policy.
        critic_learning_rate: The same for the critic.
        max_grad_norm: Bound on the gradient's norm.
        micro_tokens: Bound on the tokens of one pass, padding included.
        seed: Order of the minibatches.
        temperature: What the samples were drawn at; every distribution is taken at the same one.
        threads: Threads of torch that learn; 0 leaves their number as it is.
        schedule: Of the learning rates: ``"constant"``, ``"linear"`` or ``"cosine"``; see `optimizer.rate_factor`.
        schedule_warmup_steps: Train steps over which they rise.
        steps: Train steps of the run, for the schedule.
        weight_decay: AdamW's, for matrices.
        precision: Of matrix products: ``"float32"``, or ``"bfloat16"`` for autocast over float32 weights.
        gradient_checkpointing: Whether the backward pass computes the activations of each layer again.
        is_large: Whether to save memory and time as a language model needs it: log-probabilities in blocks, prompts
            of a group shared, groups in one minibatch, samples without advantage skipped. The gradient is the same
            but for rounding, which is why a tiny policy, whose runs are repeatable, learns without.
    """

    learning_rate: float
    critic_learning_rate: float
    max_grad_norm: float
    micro_tokens: int
    seed: int
    temperature: float = 1.0
    threads: int = 0
    schedule: str = "constant"
    schedule_warmup_steps: int = 0
    steps: int = 0
    weight_decay: float = 0.0
    precision: str = "float32"
    gradient_checkpointing: bool = False
    is_large: bool = False
