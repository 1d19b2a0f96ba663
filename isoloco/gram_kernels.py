"""The optional package ``gram-newton-schulz``: where its CUDA kernels can be used, and Newton–Schulz through them."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("isoloco")

Triple = tuple[float, float, float]

MIN_SIZE = 257  # of the smaller dim: what its symmetric kernels are made for
CAPABILITIES = (9, 10)  # Hopper, Blackwell
MAX_GROWTH = 50  # before a restart: for five steps one, after two or three, as the package itself has it for fp16


def can_be_used(matrix: Tensor) -> bool:
    """Whether the kernels are installed, fit the device of ``matrix`` (B, m, n), and are faster than torch there."""
    m, n = matrix.shape[-2:]
    return (
        matrix.device.type == "cuda"
        and m != n  # for square matrices the Gram form has no advantage
        and min(m, n) >= MIN_SIZE
        and importlib.util.find_spec("gram_newton_schulz") is not None
        and torch.cuda.get_device_capability(matrix.device)[0] in CAPABILITIES
    )


@functools.cache
def gram_kernels(
    segments: tuple[tuple[Triple, ...], ...], use_kernels: bool = True
) -> Callable[[Tensor], Tensor] | None:
    """The package's iteration with these triples, restarted before each segment but the first; None if it won't load.

    It takes matrices (B, m, n), divides them by their norm, and iterates in fp16, which is as good as bf16.
    ``use_kernels=False`` is its code in torch, which runs on the CPU too.
    """
    restarts = [sum(map(len, segments[:number])) for number in range(1, len(segments))]
    try:
        package: Any = importlib.import_module("gram_newton_schulz")
        # not compiled: CUDA graphs would reuse the memory of results, and every new shape would compile again
        iteration: Callable[[Tensor], Tensor] = package.GramNewtonSchulz(
            ns_coefficients=[list(triple) for segment in segments for triple in segment],
            gram_newton_schulz_reset_iterations=restarts,
            ns_use_kernels=use_kernels,
            compile_kwargs=None,
        )
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        logger.warning("gram-newton-schulz is installed but does not load (%s): Newton–Schulz runs on torch", error)
        return None
    return iteration
