"""Matrix products in the dtype of their operands, whatever the trainer allows for its model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_matmuls(device: torch.device) -> Iterator[None]:
    """Inside, matrix products keep the dtype of their operands: no autocast, no TF32 or bf16 in place of fp32."""
    # not torch.set_float32_matmul_precision: its getter raises in a program that has set one of these
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
