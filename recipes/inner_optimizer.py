"""The optimizer inside a replica group."""

import torch
from torch import nn

from recipes.config import Optimizer


def build_inner_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """AdamW over all parameters in one group, decay included everywhere (IsoLoCo App. A)."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group. It is a function of the step alone, so nothing of it needs healing."""
    for group in optimizer.param_groups:
        group["lr"] = lr
