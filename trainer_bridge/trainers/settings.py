"""Settings of the trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the optimisers and of the passes over the samples.

    Attributes:
        learning_rate: AdamW's learning rate for the policy.
        critic_learning_rate: AdamW's learning rate for the critic.
        max_grad_norm: Maximum norm of the gradient.
        micro_tokens: Maximum number of tokens in one pass, including padding.
        seed: Seed for shuffling the minibatches.
        temperature: Temperature at which the samples were drawn; log-probabilities are computed at the same
            temperature.
        threads: Number of torch threads for learning; 0 leaves torch's number of threads unchanged.
        schedule: Schedule of the learning rates: ``"constant"``, ``"linear"`` or ``"cosine"``; see
            `optimizer.rate_factor`.
        schedule_warmup_steps: Number of train steps at the start of the run over which the learning rates rise.
        steps: Number of train steps in the run; the schedule decays over these steps.
        weight_decay: AdamW's weight decay, applied to matrices only.
        precision: Number format of matrix products: ``"float32"``, or ``"bfloat16"`` for autocast over float32 weights.
        gradient_checkpointing: Whether the backward pass recomputes the activations of each layer, to save memory.
        packing: Whether short samples without a common prefix share rows.
        shard_mib: Maximum size in MiB of a file of weights.
        imitation_rate: Learning rate of a phase of imitation; it decays along a cosine to 0.
        imitates_with_muon: Whether Muon trains the layers' matrices in a phase of imitation; see `optimizer.muon`.
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
    packing: bool = False
    shard_mib: int = 4096
    imitation_rate: float = 0.0
    imitates_with_muon: bool = False
