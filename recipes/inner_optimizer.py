"""The optimizer inside a replica group."""

import torch
from torch import nn

from isoloco.muon import Muon
from recipes.config import Optimizer


def build_inner_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the recipe names, over all parameters, decay included everywhere (IsoLoCo App. A).

    Its state exists from the start, so that a checkpoint has all of it whether a parameter got a gradient yet or not.
    """
    optimizer: torch.optim.Optimizer
    if config.name == "Muon":
        optimizer = Muon(
            model.named_parameters(),
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            scale=config.scale,
            coefficients=config.coefficients,
            adamw=config.adamw_parameters or None,
            adamw_betas=(config.beta1, config.beta2),
            adamw_eps=config.eps,
            adamw_lr_factor=config.adamw_lr_factor,
            adamw_implementation=config.implementation,
        )
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )
    reset_state(optimizer)
    return optimizer


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Forget all gradients so far: every trained parameter has the state that it had before the first step."""
    if isinstance(optimizer, Muon):
        optimizer.reset_state()
        return
    assert isinstance(optimizer, torch.optim.AdamW)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                # as torch makes it in the first step with a gradient; its fused kernel wants the counter on the device
                device = parameter.device if group["fused"] else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group. It is a function of the step alone, so nothing of it needs healing."""
    for group in optimizer.param_groups:
        group["lr"] = lr
