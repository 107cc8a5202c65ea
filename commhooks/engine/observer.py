"""Measure the passes that a compressor watches; see `compressors/observation.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.backends import backend_of
from commhooks.comm.clocks import Mark, mark, seconds_between
from commhooks.comm.collective import Send, gather_rows, start
from commhooks.comm.cost import Backend
from commhooks.comm.counters import Counters
from commhooks.comm.link import Link, measure_link
from commhooks.comm.nodes import ranks_per_host
from commhooks.compressors.base import Compressor
from commhooks.compressors.observation import Look, Rehearsal, Watch
from commhooks.compressors.plan import ParameterInfo, UnitPlan
from commhooks.engine.rehearsal import rehearse
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.names import ParameterNames


@dataclass
class SeenPass:
    """A `Seen`. The gradients are there while the compressor looks at them."""

    step_s: float
    waiting_s: float
    computing_s: tuple[float, ...]
    layouts: Sequence[BucketLayout]
    names: ParameterNames
    gradients: Sequence[torch.Tensor] = field(default=(), repr=False)

    def plans(self, compressor: Compressor[Any]) -> list[list[UnitPlan]]:
        config = compressor.planning_config
        return [
            compressor.plan(
                [ParameterInfo.of(s.name, s.parameter, self.names, config, layout.sparse) for s in layout.slots]
            )
            for layout in self.layouts
        ]

    def rehearse(self, compressor: Compressor[Any], rounds: int, look: Look | None = None) -> Rehearsal:
        each = [
            rehearse(compressor, layout, plans, gradient, rounds, look)
            for layout, plans, gradient in zip(self.layouts, self.plans(compressor), self.gradients, strict=True)
            if not layout.sparse
        ]
        return Rehearsal(sum(one.fastest_s for one in each), sum(one.spent_s for one in each))


class Observer:
    """The times of the passes of one session. Costs nothing outside of the watch.

    Args:
        names: of the parameters.
        counters: of the session.

    Attributes:
        active: the running pass is measured.
    """

    def __init__(self, names: ParameterNames, counters: Counters) -> None:
        self.active = False
        self._names = names
        self._counters = counters
        self._watch = Watch(0, 0)
        self._follows = False  # another pass that was measured, which ended at `_ended`
        self._ended: Mark = None
        self._left: Mark = None
        # Per hook call of the pass: when the one before returned, and when it began.
        self._calls: list[tuple[Mark, Mark]] = []
        self._layouts: list[BucketLayout] = []

    def begin_pass(self, step: int, watch: Watch | None) -> None:
        """Call within the first hook call of a pass. The pass before a watch is measured, too: its end is the begin of
        the first watched one.

        Args:
            step: committed steps before the pass.
        """
        self.active = watch is not None and step + 1 >= watch.begin
        self._watch = watch or self._watch
        self._layouts.clear()
        self._calls = self._calls[-1:] if self.active else []
        self._follows = self._follows and self.active

    def entered(self, device: torch.device) -> None:
        """The hook was called with a bucket. The pass may not have begun yet."""
        self._calls.append((self._left, mark(device)))

    def add(self, layout: BucketLayout) -> None:
        """That bucket has this layout."""
        if self.active:
            self._layouts.append(layout)

    def left(self, device: torch.device) -> None:
        """The hook call returns."""
        self._left = mark(device)

    def show(self, compressor: Compressor[Any], step: int, good: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Show the compressor the pass that ends now, if it is watched and was committed. On accelerators the host
        waits.

        Args:
            step: committed steps before it, if it was committed.
            good: whether it was committed.
            results: the averaged buckets.
        """
        device = results[0].device
        began, ended, follows = self._ended, mark(device), self._follows
        self._ended, self._follows = ended, True
        complete = len(self._calls) == len(self._layouts) == len(results)
        if not follows or step < self._watch.begin or not complete or not bool(good):
            return
        self._counters.clocks.collect(wait=True)
        computing = [seconds_between(began if i == 0 else left, here) for i, (left, here) in enumerate(self._calls)]
        seen = SeenPass(
            seconds_between(began, ended),
            self._counters.clocks.last_pass.waiting_s,
            tuple(computing),
            list(self._layouts),
            self._names,
            results,
        )
        compressor.observe(seen)
        seen.gradients = ()
        self._ended = mark(device)


class GroupRanks:
    """`Ranks` of a process group.

    Args:
        device: where its collectives need their tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, counters: Counters) -> None:
        self._group = group
        self._device = device
        self._counters = counters

    @property
    def size(self) -> int:
        return self._group.size()

    @property
    def backend(self) -> Backend:
        return "gloo" if backend_of(self._group, self._device) == "gloo" else "nccl"

    def together(self) -> int:
        return ranks_per_host(self._group, self._device)

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        what = "what each rank has measured (let every rank take part in each pass)"
        rows: list[list[float]] = gather_rows(own, self._group, self._counters, what).tolist()
        return rows

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if self._group.rank() != 0:
            own.zero_()
        self._counters.handshakes += 1
        found: list[float] = start(Send(own, what="what rank 0 has measured"), self._group, None).wait().tolist()
        return found

    def link(self) -> Link:
        return measure_link(self._group, self._device)
