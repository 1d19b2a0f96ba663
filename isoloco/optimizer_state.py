"""What optimizers here keep for a parameter: fp32 (fp64 for fp64), whatever the parameter's own dtype."""

import torch
from torch import Tensor


def state_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's state, and of the arithmetic with it."""
    return torch.promote_types(parameter.dtype, torch.float32)


def zero_state(parameter: Tensor) -> Tensor:
    """Zeros shaped and placed like a parameter."""
    return torch.zeros_like(parameter, dtype=state_dtype(parameter), requires_grad=False)
