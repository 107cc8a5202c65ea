"""Runs the operators that a training queues on the simulated accelerator late, in a random order
that its waits allow.

An operator that needs no number on the host returns at once. Its outputs are NaN, or zero for
integers, until it has run. It runs when the host waits for something that comes after it. Then the
streams take turns at random, or one stream is as late as its waits allow. So a missing wait becomes
a wrong number: compare with the same training in the order of its calls.

A collective reads its tensors when it is issued, after everything that it comes after has run, and
its result is written late. So a write into a tensor that a collective still reads is not detected
here, nor is memory that is freed too early; the clocks detect both. Sparse and random operators,
the collectives of DTensor, and operators whose shapes depend on numbers run at once, after
everything that they come after.
"""

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.cuda_stand_ins import Clock, Stream

_NOT_LATE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@dataclass(eq=False)
class Work:
    """One operator. `number`: its place on its stream; it comes after all work in `after`."""

    number: int
    after: Clock
    run: Callable[[], None]


class LateExecution:
    """The queues of all streams. `seed` determines the order; if it is even, work runs only when it
    must.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._others = 0.5 if seed % 2 else 0.0
        self._queues: dict[Stream, deque[Work]] = {}
        self._lock = threading.RLock()
        self.count = 0

    def queue(self, stream: Stream, number: int, after: Clock, run: Callable[[], None]) -> None:
        with self._lock:
            self.count += 1
            self._queues.setdefault(stream, deque()).append(Work(number, after, run))

    def force(self, clock: Clock) -> None:
        """Run everything that a clock waits for."""
        with (
            self._lock,
            _disable_current_modes(),
            torch._C._AutoDispatchBelowAutograd(),
            torch.no_grad(),
        ):
            with torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD), torch._C._DisableAutocast():
                for stream, number in self._shuffled(clock):
                    self._run_until(stream, number)

    def run_all(self) -> None:
        self.force({stream: queue[-1].number for stream, queue in self._queues.items() if queue})

    def _run_until(self, stream: Stream, number: int) -> None:
        queue = self._queues.get(stream, deque())
        while queue and queue[0].number <= number:
            work = queue[0]
            for other, needed in self._shuffled(work.after):
                self._run_until(other, needed)
            if queue and queue[0] is work:  # `_run_another` may have been faster
                queue.popleft().run()
            if self._random.random() < self._others:
                self._run_another()

    def _run_another(self) -> None:
        ready = [queue for queue in self._queues.values() if queue and self._is_ready(queue[0])]
        if ready:
            self._random.choice(ready).popleft().run()

    def _is_ready(self, work: Work) -> bool:
        return all(
            not (q := self._queues.get(stream)) or q[0].number > n
            for stream, n in work.after.items()
        )

    def _shuffled(self, clock: Clock) -> list[tuple[Stream, int]]:
        return self._random.sample(list(clock.items()), len(clock))


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operator computes nothing: it returns a view, or changes shape or storage."""
    if torch.Tag.inplace_view in func.tags:
        return True
    return not writes(func) and any(
        returned.alias_info is not None for returned in func._schema.returns
    )


@functools.cache
def writes(func: Any) -> bool:
    return any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    )


@functools.cache
def can_be_late(func: Any) -> bool:
    """Whether an operator only writes into its arguments, or only makes tensors."""
    if set(func.tags) & _NOT_LATE:
        return False
    returns = func._schema.returns
    if not writes(func):
        return bool(returns) and all("Tensor" in str(returned.type) for returned in returns)
    return all(returned.alias_info is not None for returned in returns)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator that only writes into its arguments."""
    schema = func._schema
    by_alias = {
        str(argument.alias_info.before_set): args[place]
        if place < len(args)
        else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    }
    results = [by_alias[str(returned.alias_info.before_set)] for returned in schema.returns]
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)


def write_later(
    func: Any, args: Any, kwargs: Any, new: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Return a function that runs the operator and writes its results into `new`."""

    def run() -> None:
        result = func(*args, **kwargs)
        if new:
            values = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
            for target, value in zip(new, values, strict=True):
                target.copy_(value)

    return run


def collective(
    func: Any, args: Any, kwargs: Any, answers: Sequence[torch.Tensor]
) -> tuple[Any, Callable[[], None]]:
    """Begin a collective with copies of its tensors. Returns the operator's result, and a function
    that writes the answers.
    """
    copies: dict[int, torch.Tensor] = {}
    originals: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.clone()
            originals[id(copies[id(value)])] = value
        return copies[id(value)]

    result = func(*tree_map(copy, args), **tree_map(copy, kwargs))
    works = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]

    def run() -> None:
        for work in works:
            dist.Work.unbox(work).wait()
        for answer in answers:
            answer.copy_(copies[id(answer)])

    return tree_map(lambda value: originals.get(id(value), value), result), run
