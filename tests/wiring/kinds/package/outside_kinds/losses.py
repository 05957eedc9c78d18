"""A loss with a parameter of its own."""

from __future__ import annotations

from envkit.trainer_bridge.algorithms.catalogue import Algorithm
from envkit.trainer_bridge.algorithms.losses import PolicyLoss, Tokens, reinforce_loss


def scaled(tokens: Tokens, algorithm: Algorithm) -> PolicyLoss:
    """REINFORCE's loss times the parameter `strength`."""
    plain = reinforce_loss(tokens.logp_N, tokens.advantage_N)
    return PolicyLoss(algorithm.parameters["scaled"].strength * plain.loss_N, plain.clipped_N)
