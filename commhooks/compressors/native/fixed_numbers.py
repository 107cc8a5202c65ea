"""The numbers from which a kernel computes what tells its build apart from others."""

import torch


def fixed_numbers(numel: int, start: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers between -0.5 and 0.5, the same bits on every machine: float64 products and rounding are exact rules."""
    counted = torch.arange(start, start + numel, dtype=torch.float64)
    return ((counted * 0.6180339887498949).frac() - 0.5).to(dtype)
