"""The learning rate of each inner step."""

import math


def learning_rate(
    step: int,
    *,
    base_lr: float,
    total_steps: int,
    warmup_steps: int,
    warmup_start_factor: float,
    decay_type: str,
    min_lr_factor: float,
) -> float:
    """The learning rate that optimizer step ``step`` (counted from 0 over the whole run, never restarted) uses.

    It rises linearly from ``warmup_start_factor * base_lr`` at step 0 to ``base_lr`` at step ``warmup_steps``, then
    falls to ``min_lr_factor * base_lr`` at step ``total_steps`` and stays there. decay_type: "cosine", "linear" or
    "sqrt". With a cosine, 0.1 and 0.1 this is the schedule of IsoLoCo's experiments.
    Raises ValueError for another decay_type.
    """
    if step < warmup_steps:
        return base_lr * (warmup_start_factor + (1 - warmup_start_factor) * step / warmup_steps)
    progress = (step - warmup_steps) / (total_steps - warmup_steps) if step < total_steps else 1.0
    if decay_type == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif decay_type == "linear":
        remaining = 1 - progress
    elif decay_type == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        raise ValueError(f"there is no lr_scheduler.decay_type {decay_type!r}; use cosine, linear or sqrt")
    return base_lr * (min_lr_factor + (1 - min_lr_factor) * remaining)
