"""Measure the cosine between the compressed gradient and the true mean gradient on sampled backward passes.

On a sampled pass every bucket is copied before the hook runs, and the copies are averaged over the ranks after the hook
has issued all of its collectives. Training results do not change; the cost is one copy of the gradients and one plain
all-reduce.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import collective_error, gather_rows
from commhooks.comm.counters import Counters
from commhooks.errors import HookConfigError
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.layout import BucketLayout, read_layout
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import Future, held_weakly


@dataclass(frozen=True)
class Sample:
    """One sample. `products`: per parameter the inner products `[a b, a a, b b]` of the compressed gradient a and the
    true mean b."""

    backward_pass: int
    names: list[str]
    products: torch.Tensor

    def cosine(self) -> float | None:
        """The cosine over all parameters. Synchronises with the device."""
        return _cosine(self.products.sum(0).tolist())

    def per_parameter(self) -> dict[str, float | None]:
        return {name: _cosine(row) for name, row in zip(self.names, self.products.tolist(), strict=True)}


class CosineSampler:
    """Samples every `every`-th backward pass. All ranks must make the same calls.

    Per pass call `begin_pass`, then `around` for each bucket, then `compare`.
    """

    def __init__(self, every: int, names: ParameterNames, group: dist.ProcessGroup) -> None:
        self.every = every
        self.latest: Sample | None = None
        self._names = names
        self._group = held_weakly(group)
        self._passes = 0
        self._sampling = False
        # Of a sampled pass: layout, copy of this rank's gradient (1-D, float32 or float64), the hook's future.
        self._kept: list[tuple[BucketLayout, torch.Tensor, Future]] = []

    @classmethod
    def agreed(
        cls, every: int | None, names: ParameterNames, group: dist.ProcessGroup, counters: Counters
    ) -> "CosineSampler | None":
        """Make a sampler after checking that all ranks pass the same `every`; None if that is None. All ranks must call
        this. See `CommHook.sample_cosine` for the exceptions."""
        valid = every is None or (isinstance(every, int) and not isinstance(every, bool) and every >= 1)
        own = torch.tensor([every or 0 if valid else -1], device=next(iter(names.known().values())).device)
        numbers = gather_rows(own, group, counters, "the number given to sample_cosine").flatten().tolist()
        if not valid:  # not before: the others would wait
            raise HookConfigError(f"sample_cosine({every!r}); expected a number of steps, 1 or more, or None")
        if len(set(numbers)) > 1:
            raise HookConfigError(f"sample_cosine: the ranks ask for different numbers of steps (0: none): {numbers}")
        return cls(every, names, group) if every is not None else None

    def begin_pass(self) -> None:
        self._passes += 1
        self._sampling = self._passes % self.every == 0
        self._kept.clear()  # left over from a pass that was abandoned

    def around(self, bucket: Bucket, hook: Callable[[Bucket], Future]) -> Future:
        """The result of `hook`, which reduces the bucket. If this pass is sampled and the bucket is not sparse, it is
        copied before."""
        if not self._sampling or bucket.flat.is_sparse:
            return hook(bucket)
        layout = read_layout(
            bucket.flat, bucket.parameters, self._names.of_bucket(list(bucket.parameters), first=False)
        )
        gradient = bucket.flat.detach().to(compute_dtype(bucket.flat.dtype), copy=True)
        future = hook(bucket)
        self._kept.append((layout, gradient, future))
        return future

    @torch.no_grad()
    def compare(self, backward_pass: int) -> None:
        """Average the copies and compare them with the hook's results. Call it on all ranks after the last hook call of
        the pass. Waits for the hook's futures."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        names: list[str] = []
        products: list[torch.Tensor] = []
        for layout, gradient, future in kept:
            try:
                dist.all_reduce(gradient, group=self._group())
            except RuntimeError as error:
                raise collective_error("the true gradient (sample_cosine)", self._group(), error) from error
            reduced = future.wait()
            for slot in layout.slots:
                a, b = slot.of(reduced).double(), slot.of(gradient).double()
                names.append(slot.name)
                products.append(
                    torch.stack([a.dot(b), a.dot(a), b.dot(b)]).to(products[0].device if products else a.device)
                )
        self.latest = Sample(backward_pass, names, torch.stack(products))


def _cosine(products: list[float]) -> float | None:
    """The cosine from `[a b, a a, b b]`; None if a gradient is zero or not finite."""
    ab, aa, bb = products
    length = math.sqrt(aa) * math.sqrt(bb) if aa > 0 and bb > 0 else 0.0
    return ab / length if 0 < length < math.inf else None
