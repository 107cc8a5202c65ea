"""The weights of a model as one tensor each, and as buckets, as DDP makes them of its gradients."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from commhooks.gradients.bucket import Bucket
from commhooks.gradients.layout import to_logical, to_memory
from commhooks.gradients.precision import compute_dtype

BUCKET_BYTES = 64 * 2**20


def packed(tensors: Sequence[torch.Tensor]) -> Iterator[Bucket]:
    """Copies of the weights, or of other tensors, in buckets: last one first, each bucket on one device, in float32
    (float64 for tensors in float64)."""
    groups = _groups(tensors[::-1])
    for index, each in enumerate(groups):
        size, first = sum(tensor.numel() for tensor in each), each[0]
        flat = torch.empty(size, dtype=compute_dtype(first.dtype), device=first.device)
        bucket = Bucket(flat, each, index, is_last=index == len(groups) - 1)
        for tensor, part in _parts(bucket):
            part.copy_(to_memory(tensor.detach(), tensor))
        yield bucket


def divided(tensors: Sequence[torch.Tensor], sizes: Sequence[int], parts: int) -> list[list[torch.Tensor]]:
    """The tensors in so many parts of about the same size, in order. A part beside a large tensor may be empty.

    Args:
        sizes: of the tensors, or of those of which they are shards: ranks with other shards divide them alike.
    """
    total, before = sum(sizes), 0
    found: list[list[torch.Tensor]] = [[] for _ in range(parts)]
    for each, size in zip(tensors, sizes, strict=True):
        middle = before + size / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))].append(each)
        before += size
    return found


def copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the weights by name, flat in memory order, in the dtypes of `packed`."""
    return {n: to_memory(p.detach(), p).to(compute_dtype(p.dtype), copy=True) for n, p in parameters.items()}


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Let the weights be `values`, by name and flat in memory order, rounded to their dtypes."""
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))


def write_back(bucket: Bucket) -> None:
    """Let the tensors be what is in the bucket, rounded to their dtypes."""
    for tensor, part in _parts(bucket):
        tensor.detach().copy_(to_logical(part, tensor))


class SharedBuffers:
    """The buffers of a model, such as running statistics: each rank has its own for a while."""

    def __init__(self) -> None:
        self._common: dict[str, torch.Tensor] = {}

    def note(self, module: torch.nn.Module) -> None:
        """The buffers are equal on all ranks now, unless they were noted before. Sparse ones, such as those of a graph,
        stay each rank's own."""
        if not self._common:
            dense = {name: each for name, each in module.named_buffers() if each.layout is torch.strided}
            self._common = {name: each.clone() for name, each in dense.items()}

    def forget(self) -> None:
        self._common = {}

    def pairs(self, module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer, with what it was when all ranks had the same. One that was replaced by one of another shape is
        taken for unchanged: it stays each rank's own."""
        now = dict(module.named_buffers())
        return [
            (now[name] if name in now and now[name].shape == common.shape else common, common)
            for name, common in self._common.items()
        ]


def _parts(bucket: Bucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(bucket.parameters, bucket.flat.split([each.numel() for each in bucket.parameters]), strict=True)


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one device and one dtype of computation, up to `BUCKET_BYTES` in a group but at least one."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        dtype = compute_dtype(tensor.dtype)
        mine = groups.setdefault((tensor.device, dtype), [[]])
        if mine[-1] and sum(each.numel() for each in [*mine[-1], tensor]) * dtype.itemsize > BUCKET_BYTES:
            mine.append([])
        mine[-1].append(tensor)
    return [group for each in groups.values() for group in each]
