"""The weights of a model as buckets, as DDP makes them of its gradients."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from commhooks.gradients.bucket import Bucket
from commhooks.gradients.layout import to_logical, to_memory
from commhooks.gradients.precision import compute_dtype

BUCKET_BYTES = 64 * 2**20


def weight_buckets(parameters: Mapping[str, torch.Tensor]) -> list[Bucket]:
    """Copies of the weights in buckets, last parameter first, each on one device, in float32 (float64 for weights in
    float64)."""
    buckets = [_packed(each, index) for index, each in enumerate(_groups(list(parameters.values())[::-1]))]
    buckets[-1].is_last = True
    return buckets


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Let the weights be `values`, by name and flat in memory order, rounded to their dtypes."""
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))


def changes(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`now - before`, and exactly 0 where they are equal, also where both are infinite."""
    return torch.where(now == before, 0, now - before)


def write_back(buckets: Sequence[Bucket]) -> None:
    """Let the weights be what is in the buckets, rounded to their dtypes."""
    for bucket in buckets:
        for parameter, part in _parts(bucket):
            parameter.detach().copy_(to_logical(part, parameter))


def _packed(parameters: Sequence[torch.Tensor], index: int) -> Bucket:
    first, size = parameters[0], sum(p.numel() for p in parameters)
    flat = torch.empty(size, dtype=compute_dtype(first.dtype), device=first.device)
    bucket = Bucket(flat, parameters, index, is_last=False)
    for parameter, part in _parts(bucket):
        part.copy_(to_memory(parameter.detach(), parameter))
    return bucket


def _parts(bucket: Bucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    parameters = bucket.parameters
    return zip(parameters, bucket.flat.split([p.numel() for p in parameters]), strict=True)


def _groups(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters of one device and one dtype of computation, up to `BUCKET_BYTES` in a group but at least one."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
    for parameter in parameters:
        dtype = compute_dtype(parameter.dtype)
        mine = groups.setdefault((parameter.device, dtype), [[]])
        if mine[-1] and sum(p.numel() for p in [*mine[-1], parameter]) * dtype.itemsize > BUCKET_BYTES:
            mine.append([])
        mine[-1].append(parameter)
    return [group for each in groups.values() for group in each]
