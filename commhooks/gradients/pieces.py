"""Many pieces of a bucket as one tensor and back, in one or two operators however many they are."""

from collections.abc import Sequence

import torch


def join(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy `pieces` (1-D, of one dtype), one after another, into `out` (1-D, of any dtype)."""
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif pieces[0].dtype == out.dtype:
        torch.cat(list(pieces), out=out)
    else:  # converting each piece would take an operator per piece
        out.copy_(torch.cat(list(pieces)))


def divide(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy `whole` (1-D, of any dtype) into `pieces` (1-D, of one dtype), one after another."""
    if len(pieces) == 1:
        pieces[0].copy_(whole)
    else:
        torch.split_with_sizes_copy(whole.to(pieces[0].dtype), [len(each) for each in pieces], out=list(pieces))
