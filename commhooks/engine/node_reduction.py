"""Reduce a bucket hierarchically over nodes.

Gradients are averaged exactly inside a node and compressed between nodes. Every parameter has an
owner in each node: the rank with a certain local rank. If the compressor has no learned state, the
bucket is divided into equal parts instead. For each bucket:

    1. each rank sends each gradient to its owner in the node, which sums the node's gradients
    2. the owners in all nodes average these sums with the compressor
    3. each owner sends the average, and what the compressor has learned, to the other ranks of its
       node

So each rank compresses, and keeps residuals for, only its share of the bucket.

If the compressor keeps residuals, an owner works on the sum of its node and divides the result at
the end. The residual is then the same as if the other ranks of the node had gradients and residuals
of zero, so the mean of the residuals over all ranks is the same as without nodes, and checkpoints
do not depend on the nodes. A compressor without residuals gets the node's mean, which is less
likely to overflow in float16.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Send, start
from commhooks.comm.nodes import Nodes
from commhooks.comm.packing import concat_into, scatter_into
from commhooks.compressors.base import Compressor, Exchange, StepInfo, Verdict
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.reduction import FlatReduction, gather_held, zeros_for
from commhooks.engine.state import LearnedState
from commhooks.engine.task import NO_STATE, Done, ExchangeTask, new_task
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot

Field = tuple[StateField, UnitPlan]
Splits = tuple[Sequence[int], Sequence[int]]
"""How many elements go to each rank, and how many come from each rank."""
Owned = TypeVar("Owned", Slot, UnitPlan)
WINDOW_NUMEL = 25 * 2**20 // 4
"""Elements of a bucket of float32 gradients, with DDP's default `bucket_cap_mb`."""


def owners_of(sizes: Mapping[str, int], ranks_per_node: int) -> dict[str, int]:
    """Choose the owner of each parameter, a local rank, so that shares of a bucket are about equal.

    The result depends on the model only, because residuals are loaded before the buckets are known.
    `sizes` must be in the order of registration.

    DDP fills its buckets in about the reverse order. So this function walks the parameters in that
    order, cuts them into windows of about a bucket, and distributes each window from its largest
    parameter to its smallest.
    """
    owners: dict[str, int] = {}
    total = [0] * ranks_per_node
    for window in _windows(sizes):
        parts: list[list[str]] = [[] for _ in range(ranks_per_node)]
        load = [0] * ranks_per_node
        for name in sorted(window, key=lambda name: -sizes[name]):
            part = load.index(min(load))
            parts[part].append(name)
            load[part] += sizes[name]
        # Give the largest part to the rank that owns least so far.
        by_load = sorted(range(ranks_per_node), key=lambda part: -load[part])
        by_total = sorted(range(ranks_per_node), key=lambda rank: total[rank])
        for part, rank in zip(by_load, by_total, strict=True):
            owners |= dict.fromkeys(parts[part], rank)
            total[rank] += load[part]
    return owners


def _windows(sizes: Mapping[str, int]) -> list[list[str]]:
    windows: list[list[str]] = [[]]
    numel = 0
    for name in reversed(list(sizes)):
        if windows[-1] and numel + sizes[name] > WINDOW_NUMEL:
            windows.append([])
            numel = 0
        windows[-1].insert(0, name)
        numel += sizes[name]
    return windows


def equal_parts(numel: int, count: int) -> list[int]:
    return [numel * (part + 1) // count - numel * part // count for part in range(count)]


def per_owner(
    items: Sequence[Owned], owners: Mapping[str, int], ranks_per_node: int
) -> list[list[Owned]]:
    """Divide the slots or plans of a bucket among their owners: one list per local rank."""
    lists: list[list[Owned]] = [[] for _ in range(ranks_per_node)]
    for item in items:
        lists[owners[item.name]].append(item)
    return lists


def replicated_fields(compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[Field]:
    """List the learned tensors of `plans` that are equal on all ranks.

    An owner sends them to its node.
    """
    replicated = [field for field in compressor.state_fields if field.replicated]
    compressed = [plan for plan in plans if plan.compressed]
    # A unit may lack a field, which then has no elements.
    return [(field, plan) for plan in compressed for field in replicated if field.size_bytes(plan)]


def part_sizes(gradient_bytes: int, fields: Sequence[Field]) -> list[int]:
    """Return the bytes of an owner's message: gradients, fields, and a flag per field."""
    return [gradient_bytes, *(field.size_bytes(plan) for field, plan in fields), len(fields)]


def buffer_sizes(sizes: Sequence[Sequence[int]], local_rank: int) -> tuple[int, int]:
    """Return the bytes of the send and the receive buffer, given the `part_sizes` of all owners."""
    own_parts = sizes[local_rank]
    gradients_sent = sum(parts[0] for parts in sizes)
    gradients_received = len(sizes) * own_parts[0]
    results_received = sum(sum(parts) for parts in sizes)
    return max(gradients_sent, sum(own_parts)), max(gradients_received, results_received)


class HierarchicalWorkspace:
    """Holds the buffers for one bucket if ranks form nodes, allocated once.

    `compressor` averages between the nodes.

    Attributes:
        share: this rank's share of the gradients, 1-D.
        work: the compressor's workspace for the share; None if nothing in the share is compressed.
        to_owners, from_owners: the splits of `by_owner` (elements) and `results` (bytes).
        gradients, averages: receive the node's gradients of this rank's share, and the `results` of
            all shares.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        owners: Mapping[str, int],
        nodes: Nodes,
    ) -> None:
        local_rank = nodes.local_rank
        ranks = nodes.ranks_per_node
        self._local_rank = local_rank
        self._must_read_flags = (
            precision.is_host_readable(layout.device) or compressor.needs_exact_step
        )
        slots = per_owner(layout.slots, owners, ranks)
        if compressor.elementwise:
            ends = itertools.accumulate(equal_parts(layout.numel, ranks), initial=0)
            self._runs = [[part] for part in itertools.pairwise(ends)]
        else:
            self._runs = [_runs(owned) for owned in slots]
        plans_of = per_owner(plans, owners, ranks)
        self._fields = [replicated_fields(compressor, owned) for owned in plans_of]
        self._allocate(layout)
        # For each learned tensor in this rank's message, whether it exists: on the host and on the
        # device.
        self._exist = [False] * len(self._fields[local_rank])
        self._flags = torch.zeros(len(self._exist), dtype=torch.uint8, device=layout.device)

        mine = plans_of[local_rank]
        self.compresses = not compressor.elementwise and any(plan.compressed for plan in mine)
        self.work = None
        if self.compresses:
            self.work = compressor.workspace(_layout_of(slots[local_rank], self.share), mine)

    def _allocate(self, layout: BucketLayout) -> None:
        numels = [sum(end - begin for begin, end in runs) for runs in self._runs]
        self._sizes = [
            part_sizes(numel * layout.dtype.itemsize, fields)
            for numel, fields in zip(numels, self._fields, strict=True)
        ]
        sizes = [sum(parts) for parts in self._sizes]
        numel = numels[self._local_rank]
        size = sizes[self._local_rank]
        self.to_owners: Splits = (numels, [numel] * len(numels))
        self.from_owners: Splits = ([size], sizes)
        # Gradients and averages share memory, because the gradients have been read before the
        # averages are sent.
        sent, arrived = (
            torch.zeros(count, dtype=torch.uint8, device=layout.device)
            for count in buffer_sizes(self._sizes, self._local_rank)
        )
        self._by_owner = sent[: layout.numel * layout.dtype.itemsize].view(layout.dtype)
        self._results = sent[:size]
        gradient_bytes = len(numels) * numel * layout.dtype.itemsize
        self.gradients = arrived[:gradient_bytes].view(layout.dtype)
        self.averages = arrived[: sum(sizes)]
        self.share = torch.zeros(numel, dtype=layout.dtype, device=layout.device)

    def by_owner(self, flat: torch.Tensor) -> torch.Tensor:
        concat_into([flat[begin:end] for runs in self._runs for begin, end in runs], self._by_owner)
        return self._by_owner

    def results(self, state: LearnedState) -> torch.Tensor:
        """Write this rank's message to its node (uint8).

        It has `share`, the replicated tensors that the compressor has learned for the share, and a
        flag per tensor, 1 if the tensor exists.
        """
        fields = self._fields[self._local_rank]
        pieces = self._results.split(self._sizes[self._local_rank])
        pieces[0].copy_(self.share.view(torch.uint8))
        for (field, plan), piece in zip(fields, pieces[1:-1], strict=True):
            learned = state[field.key].get(plan.key)
            if learned is not None:
                piece.copy_(_bytes(learned))
        exist = [plan.key in state[field.key] for field, plan in fields]
        # only in the first steps, because this copy makes the host wait for an accelerator
        if exist != self._exist:
            self._flags.copy_(torch.tensor(exist, dtype=torch.uint8))
            self._exist = exist
        pieces[-1].copy_(self._flags)
        return self._results

    def take(self, flat: torch.Tensor, state: LearnedState) -> None:
        size = flat.element_size()
        bucket = flat.view(torch.uint8)
        for owner, message in enumerate(self.averages.split(list(self.from_owners[1]))):
            gradients, *learned, flags = message.split(self._sizes[owner])
            places = [bucket[begin * size : end * size] for begin, end in self._runs[owner]]
            if places:
                scatter_into(gradients, places)
            if owner != self._local_rank and learned:
                self._learn(self._fields[owner], learned, flags, state)

    def _learn(
        self,
        fields: Sequence[Field],
        learned: Sequence[torch.Tensor],
        flags: torch.Tensor,
        state: LearnedState,
    ) -> None:
        complete = all(plan.key in state[field.key] for field, plan in fields)
        # Reading the flags makes the host wait for an accelerator. Once all tensors exist they do
        # not disappear, so read the flags only in the first steps.
        there = flags.tolist() if self._must_read_flags or not complete else [1] * len(fields)
        for (field, plan), new, is_there in zip(fields, learned, there, strict=True):
            tensors = state[field.key]
            if not is_there:
                tensors.pop(plan.key, None)
                continue
            if plan.key not in tensors:
                tensors[plan.key] = torch.empty(
                    field.shape(plan), dtype=field.dtype(plan), device=new.device
                )
            _bytes(tensors[plan.key]).copy_(new)


class HierarchicalReduction(FlatReduction):
    """Each rank compresses its share of every bucket, on behalf of its node.

    `parameters`: all, in the same order on all ranks.
    """

    nodes: Nodes

    def __init__(self, nodes: Nodes, parameters: Mapping[str, torch.Tensor]) -> None:
        self.nodes = nodes
        self.description = nodes.description
        self.ranks_per_residual = nodes.ranks_per_node
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._owners = owners_of(sizes, nodes.ranks_per_node)

    def keeps(self, name: str) -> bool:
        return self._owners[name] == self.nodes.local_rank

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        if not compressor.elementwise:
            return list(plans)
        # Without learned state all parameters take part, except sparse gradients, which cannot be
        # divided into shares.
        return [_sent_whole(plan) if plan.lowered else plan for plan in plans]

    def workspace(
        self,
        compressor: Compressor[Any],
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        step: StepInfo,
    ) -> HierarchicalWorkspace:
        work = HierarchicalWorkspace(compressor, layout, plans, self._owners, self.nodes)
        if work.compresses:
            compressor.allocate(work.work, self._between(step))
        return work

    def memory_plan(
        self,
        compressor: Compressor[Any],
        plans: Sequence[UnitPlan],
        buckets: Sequence[Sequence[UnitPlan]],
    ) -> MemoryPlan:
        """Return the bytes needed on this rank of a node.

        `factors` includes what other owners of the node have learned, and `copies` the messages
        inside the node.
        """
        plans = self.plans(compressor, plans)
        buckets = [self.plans(compressor, bucket) for bucket in buckets]
        if compressor.elementwise:
            whole = compressor.memory_plan(plans, buckets)
            packed = -(-whole.packed // self.nodes.ranks_per_node)
            share = dataclasses.replace(whole, packed=packed)
        else:
            mine = self._mine(plans)
            share = compressor.memory_plan(mine, [self._mine(bucket) for bucket in buckets])
        others = [plan for plan in plans if not self.keeps(plan.name)]
        learned = sum(
            field.size_bytes(plan) for field, plan in replicated_fields(compressor, others)
        )
        messages = sum(
            self._message_bytes(compressor, bucket)
            for bucket in buckets
            if any(plan.compressed for plan in bucket)
        )
        return dataclasses.replace(
            share, factors=share.factors + learned, copies=share.copies + messages
        )

    def _mine(self, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        return per_owner(plans, self._owners, self.nodes.ranks_per_node)[self.nodes.local_rank]

    def _message_bytes(self, compressor: Compressor[Any], bucket: Sequence[UnitPlan]) -> int:
        """Return the bytes of the buffers of a `HierarchicalWorkspace`."""
        shares = per_owner(bucket, self._owners, self.nodes.ranks_per_node)
        gradients = [sum(plan.size_bytes() for plan in plans) for plans in shares]
        if compressor.elementwise:
            gradients = equal_parts(sum(gradients), len(shares))
        sizes = [
            part_sizes(gradient_bytes, replicated_fields(compressor, plans))
            for gradient_bytes, plans in zip(gradients, shares, strict=True)
        ]
        local_rank = self.nodes.local_rank
        return sum(buffer_sizes(sizes, local_rank)) + gradients[local_rank]

    def exchange(
        self, compressor: Compressor[Any]
    ) -> Callable[[torch.Tensor, HierarchicalWorkspace, LearnedState, StepInfo], Exchange]:
        return functools.partial(self._shared_exchange, compressor)

    def _shared_exchange(
        self,
        compressor: Compressor[Any],
        flat: torch.Tensor,
        work: HierarchicalWorkspace,
        state: LearnedState,
        step: StepInfo,
    ) -> Exchange:
        """Average a bucket in three steps; see the module."""
        # A compressor with residuals gets the node's sum, and its result is divided afterwards.
        ranks = self.nodes.ranks_per_node
        before, after = (1, ranks) if state.local else (ranks, 1)
        yield from self._sum_in_node(flat, work, before)  # 1.
        yield from self._average_between_nodes(compressor, work, state, step)  # 2.
        work.share.div_(after)
        yield from self._send_to_node(flat, work, state)  # 3.
        return None

    def _sum_in_node(
        self, flat: torch.Tensor, work: HierarchicalWorkspace, divisor: int
    ) -> Generator[Send, Any, None]:
        """Write the sum of the node's gradients / `divisor` into this rank's share."""
        yield Send(
            work.by_owner(flat),
            what="the node's gradients",
            op="all_to_all",
            splits=work.to_owners,
            into=work.gradients,
            over="intra_node",
        )
        by_rank = work.gradients.div_(divisor).view(self.nodes.ranks_per_node, work.share.numel())
        first, *others = by_rank
        work.share.copy_(first)
        for gradient in others:  # add in this order, so that no bit depends on the bucket layout
            work.share.add_(gradient)

    def _average_between_nodes(
        self,
        compressor: Compressor[Any],
        work: HierarchicalWorkspace,
        state: LearnedState,
        step: StepInfo,
    ) -> Generator[Send | Verdict, Any, None]:
        """Average the share with the compressor, and yield one verdict."""
        share = work.share
        had_verdict = False
        if share.numel() > 0:
            task = self._between_nodes(compressor, work, state, step)
            answer = None
            while not isinstance(yielded := task.advance(answer), Done):
                if isinstance(yielded, Send):
                    yielded.over = "inter_node"
                else:
                    had_verdict = True
                answer = yield yielded
            if yielded.result is not share:
                share.copy_(yielded.result)
        if not had_verdict:
            yield Verdict(torch.ones((), dtype=torch.bool, device=share.device))

    def _send_to_node(
        self, flat: torch.Tensor, work: HierarchicalWorkspace, state: LearnedState
    ) -> Generator[Send, Any, None]:
        # This follows the verdict, so the message includes what the compressor has learned.
        yield Send(
            work.results(state),
            what="the node's averages",
            op="gather",
            splits=work.from_owners,
            into=work.averages,
            over="intra_node",
        )
        work.take(flat, state)

    def redistribute_residuals(
        self, state: LearnedState, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        for key in sorted(state.local):
            if not state.local_shared:
                self._collect(state[key], parameters)
                continue
            for name, mean in list(state[key].items()):
                del state[key][name]
                self.rebase(state[key], name, mean)
                state.local_shared = False

    def rebase(self, tensors: dict[str, torch.Tensor], name: str, mean: torch.Tensor) -> None:
        if self.keeps(name):
            tensors[name] = mean * self.nodes.ranks_per_node

    def _between_nodes(
        self,
        compressor: Compressor[Any],
        work: HierarchicalWorkspace,
        state: LearnedState,
        step: StepInfo,
    ) -> ExchangeTask:
        between = self._between(step)
        if not compressor.transactional:
            return new_task(compressor, True, work.share, None, NO_STATE, between)
        return new_task(compressor, work.compresses, work.share, work.work, state, between)

    def _between(self, step: StepInfo) -> StepInfo:
        return StepInfo(
            step.number, self.nodes.count, step.residual_factor, self.nodes.inter_node.rank()
        )

    def _collect(
        self, tensors: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Sum the node's tensors of each parameter at its owner, if another rank has one.

        These ranks have loaded the checkpoint of a run with other nodes.
        """
        held = gather_held(tensors, parameters, self.nodes.intra_node)
        for place, (name, parameter) in enumerate(parameters.items()):
            if not any(row[place] for rank, row in enumerate(held) if rank != self._owners[name]):
                continue
            total = tensors.pop(name, None)
            if total is None:
                total = zeros_for(parameter)
            send = Send(total, what=f"the residual of {name} in the node")
            start(send, self.nodes.intra_node, None).wait()
            if self.keeps(name):
                tensors[name] = total


def _sent_whole(plan: UnitPlan) -> UnitPlan:
    return dataclasses.replace(plan, compressed=True, numel_compressed=plan.numel)


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot.offset:
            runs[-1] = (runs[-1][0], slot.stop)
        else:
            runs.append((slot.offset, slot.stop))
    return runs


def _layout_of(slots: Sequence[Slot], share: torch.Tensor) -> BucketLayout:
    offsets = itertools.accumulate((slot.numel for slot in slots), initial=0)
    moved = [
        Slot(slot.name, slot.parameter, offset, slot.numel)
        for slot, offset in zip(slots, offsets, strict=False)
    ]
    return BucketLayout(tuple(moved), share.numel(), share.dtype, share.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
