"""The weights of a model as buckets, as DDP makes them of its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence

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


def write_back(buckets: Sequence[Bucket]) -> None:
    """Let the weights be what is in the buckets, rounded to their dtypes."""
    for bucket in buckets:
        for parameter, part in _parts(bucket):
            parameter.detach().copy_(to_logical(part, parameter))


class SharedBuffers:
    """The buffers of a model that hold numbers, such as running statistics: each rank has its own for a while."""

    def __init__(self) -> None:
        self._before: list[torch.Tensor] | None = None

    def note(self, module: torch.nn.Module) -> None:
        """The buffers are equal on all ranks now, unless they were noted before."""
        if self._before is None:
            self._before = [each.clone() for each in _numbers(module)]

    def forget(self) -> None:
        self._before = None

    def share(self, module: torch.nn.Module, average: Callable[[list[torch.Tensor]], None]) -> None:
        """Let the buffers be the mean over the ranks. What has not changed since they were equal keeps its bits.

        Args:
            average: replaces each tensor by its mean over the ranks.
        """
        if self._before is None:
            return
        pairs = list(zip(_numbers(module), self._before, strict=True))
        # Where both are infinite, too, there is no change.
        changes = [torch.where(now == before, 0, now - before) for now, before in pairs]
        if changes:
            average(changes)
        for (now, before), change in zip(pairs, changes, strict=True):
            now.copy_(torch.where(change == 0, before, before + change))
            before.copy_(now)


def _numbers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in module.buffers() if each.is_floating_point()]


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
