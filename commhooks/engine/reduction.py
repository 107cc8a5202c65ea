"""Reduce a bucket over the ranks: flat, where every rank compresses all of it, or hierarchically,
with nodes.

With nodes, gradients are averaged exactly inside a node and compressed between nodes. Every
parameter has an owner in each node: the rank with a certain local rank. If the compressor has no
learned state, the bucket is divided into equal parts instead. For each bucket:

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Send, gather_rows, start
from commhooks.comm.nodes import Nodes
from commhooks.comm.wire import concat_into, scatter_into
from commhooks.compressors.base import Compressor, Exchange, StepInfo, Verdict
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.engine.task import NO_STATE, Done, ExchangeTask, new_task
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype

Field = tuple[StateField, UnitPlan]
Splits = tuple[Sequence[int], Sequence[int]]
"""How many elements go to each rank, and how many come from each rank."""
WINDOW_NUMEL = 25 * 2**20 // 4
"""Elements of a bucket of float32 gradients, with DDP's default `bucket_cap_mb`."""


class FlatReduction:
    """Every rank compresses every bucket, and exchanges it with all other ranks. `description`: the
    nodes, for the summary. `ranks_per_residual`: number of ranks whose summed gradient a residual
    corrects.
    """

    nodes: Nodes | None = None
    description: str = ""
    ranks_per_residual: int = 1

    def keeps(self, name: str) -> bool:
        """Return whether this rank keeps the local tensors (residuals) of the parameter `name`."""
        return True

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        """Mark the parameters of a bucket that `exchange` handles as compressed."""
        return list(plans)

    def workspace(
        self,
        compressor: Compressor[Any],
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        step: StepInfo,
    ) -> Any:
        """Allocate the workspace of `exchange` for buckets of this layout, in which something is
        compressed.
        """
        work = compressor.workspace(layout, plans)
        compressor.allocate(work, step)
        return work

    def memory_plan(
        self,
        compressor: Compressor[Any],
        plans: Sequence[UnitPlan],
        buckets: Sequence[Sequence[UnitPlan]],
    ) -> MemoryPlan:
        return compressor.memory_plan(plans, buckets)

    def exchange(
        self, compressor: Compressor[Any]
    ) -> Callable[[torch.Tensor, Any, LearnedState, StepInfo], Exchange]:
        return compressor.exchange

    def redistribute_residuals(
        self, state: LearnedState, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Move loaded local tensors (residuals) to the ranks that use them, without changing their
        mean over all ranks. If the ranks' local tensors may differ, all ranks of `group` call this
        after comparing their states. `parameters` has all parameters of the model.
        """
        # After a save with nodes each rank has only the residuals of its share. Add zeros for the
        # rest, so that all ranks save the same names.
        for key in sorted(state.local) if parameters else ():
            held = gather_held(state[key], parameters, group)
            for place, name in enumerate(parameters):
                if any(row[place] for row in held):
                    state[key].setdefault(name, zeros_for(parameters[name]))

    def rebase(self, tensors: dict[str, torch.Tensor], name: str, mean: torch.Tensor) -> None:
        """Set the entry `name` of `tensors`, a field by parameter name, as if all ranks had just
        loaded `mean`.
        """
        tensors[name] = mean


FLAT = FlatReduction()


def gather_held(
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
) -> list[list[bool]]:
    """Return, for each rank of `group` and each parameter, whether `tensors` has an entry there.
    All ranks must call this.
    """
    device = next(iter(parameters.values())).device
    own = torch.tensor([name in tensors for name in parameters], dtype=torch.uint8, device=device)
    held: list[list[bool]] = (
        gather_rows(own, group, None, "which residuals each rank has").bool().tolist()
    )
    return held


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(
        parameter.numel(), dtype=compute_dtype(parameter.dtype), device=parameter.device
    )


def owners_of(sizes: Mapping[str, int], ranks_per_node: int) -> dict[str, int]:
    """Choose the owner of each parameter, a local rank, so that the ranks have about equal shares
    of every bucket. The result depends on the model only, because residuals are loaded before the
    buckets are known. `sizes` must be in the order of registration.

    DDP fills its buckets in about the reverse order. So this function walks the parameters in that
    order, cuts them into windows of about a bucket, and distributes each window from its largest
    parameter to its smallest.
    """
    windows: list[list[str]] = [[]]
    for name in reversed(list(sizes)):
        if windows[-1] and sum(sizes[each] for each in windows[-1]) + sizes[name] > WINDOW_NUMEL:
            windows.append([])
        windows[-1].insert(0, name)
    owners: dict[str, int] = {}
    total = [0] * ranks_per_node
    for window in windows:
        parts: list[list[str]] = [[] for _ in range(ranks_per_node)]
        load = [0] * ranks_per_node
        for name in sorted(window, key=lambda each: -sizes[each]):
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


def equal_parts(numel: int, count: int) -> list[int]:
    return [numel * (part + 1) // count - numel * part // count for part in range(count)]


def plans_of_owners(
    plans: Sequence[UnitPlan], owners: Mapping[str, int], ranks_per_node: int
) -> list[list[UnitPlan]]:
    return [
        [plan for plan in plans if owners[plan.name] == owner] for owner in range(ranks_per_node)
    ]


def replicated_fields(compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[Field]:
    """List the learned tensors of these plans that are equal on all ranks. An owner sends them to
    its node.
    """
    replicated = [each for each in compressor.state_fields if each.replicated]
    compressed = [plan for plan in plans if plan.compressed]
    # A unit may lack a field, which then has no elements.
    return [(field, plan) for plan in compressed for field in replicated if field.size_bytes(plan)]


def part_sizes(gradient_bytes: int, fields: Sequence[Field]) -> list[int]:
    """Return the bytes of each part of an owner's message: gradients, fields, and a flag per
    field.
    """
    return [gradient_bytes, *(field.size_bytes(plan) for field, plan in fields), len(fields)]


def buffer_sizes(sizes: Sequence[Sequence[int]], local_rank: int) -> tuple[int, int]:
    """Return the bytes of the send and the receive buffer, given the `part_sizes` of all owners."""
    count, own, total = len(sizes), sizes[local_rank], sum(each[0] for each in sizes)
    return max(total, sum(own)), max(count * own[0], sum(map(sum, sizes)))


class HierarchicalWorkspace:
    """Holds the buffers for one bucket if ranks form nodes, allocated once. `compressor` averages
    between the nodes.

    Attributes:
        own: this rank's share of the gradients, 1-D.
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
        local, count = nodes.local_rank, nodes.ranks_per_node
        self._local_rank, self._count = local, count
        self._must_read_flags = (
            precision.is_host_readable(layout.device) or compressor.needs_exact_step
        )
        slots = [
            [slot for slot in layout.slots if owners[slot.name] == owner] for owner in range(count)
        ]
        if compressor.elementwise:
            ends = itertools.accumulate(equal_parts(layout.numel, count), initial=0)
            self._runs = [[part] for part in itertools.pairwise(ends)]
        else:
            self._runs = [_runs(each) for each in slots]
        self._fields = [
            replicated_fields(compressor, mine) for mine in plans_of_owners(plans, owners, count)
        ]
        # For each learned tensor in this rank's message, whether it exists: on the host and on the
        # device.
        self._exist = [False] * len(self._fields[local])
        self._flags = torch.zeros(len(self._exist), dtype=torch.uint8, device=layout.device)
        numels = [sum(end - begin for begin, end in each) for each in self._runs]
        gradient_bytes = [numel * layout.dtype.itemsize for numel in numels]
        self._sizes = [part_sizes(*each) for each in zip(gradient_bytes, self._fields, strict=True)]
        self.to_owners: Splits = (numels, [numels[local]] * count)
        self.from_owners: Splits = ([sum(self._sizes[local])], [sum(each) for each in self._sizes])
        # Gradients and averages share memory, because the gradients have been read before the
        # averages are sent.
        total, share = layout.numel * layout.dtype.itemsize, gradient_bytes[local]
        results, averages = sum(self._sizes[local]), sum(map(sum, self._sizes))
        sent, arrived = (
            torch.zeros(size, dtype=torch.uint8, device=layout.device)
            for size in buffer_sizes(self._sizes, local)
        )
        self._by_owner = sent[:total].view(layout.dtype)
        self._results = sent[:results]
        self.gradients = arrived[: count * share].view(layout.dtype)
        self.averages = arrived[:averages]
        self.own = torch.zeros(numels[local], dtype=layout.dtype, device=layout.device)

        mine = [plan for plan in plans if owners[plan.name] == local]
        self.compresses = not compressor.elementwise and any(plan.compressed for plan in mine)
        self.work = (
            compressor.workspace(_layout_of(slots[local], self.own), mine)
            if self.compresses
            else None
        )

    def by_owner(self, flat: torch.Tensor) -> torch.Tensor:
        concat_into([flat[begin:end] for runs in self._runs for begin, end in runs], self._by_owner)
        return self._by_owner

    def results(self, state: LearnedState) -> torch.Tensor:
        """Write this rank's message to its node (uint8): `own`, the replicated tensors that the
        compressor has learned for the share, and a flag per tensor, 1 if the tensor exists.
        """
        fields = self._fields[self._local_rank]
        pieces = self._results.split(self._sizes[self._local_rank])
        pieces[0].copy_(self.own.view(torch.uint8))
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
            if self._runs[owner]:
                scatter_into(
                    gradients,
                    [bucket[begin * size : end * size] for begin, end in self._runs[owner]],
                )
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
            known = state[field.key]
            if not is_there:
                known.pop(plan.key, None)
                continue
            if plan.key not in known:
                known[plan.key] = torch.empty(
                    field.shape(plan), dtype=field.dtype(plan), device=new.device
                )
            _bytes(known[plan.key]).copy_(new)


class HierarchicalReduction(FlatReduction):
    """Each rank compresses its share of every bucket, on behalf of its node. `parameters`: all, in
    the same order on all ranks.
    """

    nodes: Nodes

    def __init__(self, nodes: Nodes, parameters: Mapping[str, torch.Tensor]) -> None:
        self.nodes, self.description = nodes, nodes.description
        self.ranks_per_residual = nodes.ranks_per_node
        self._owners = owners_of(
            {name: each.numel() for name, each in parameters.items()}, nodes.ranks_per_node
        )

    def keeps(self, name: str) -> bool:
        return self._owners[name] == self.nodes.local_rank

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        if not compressor.elementwise:
            return list(plans)
        # Without learned state all parameters take part, except sparse gradients, which cannot be
        # divided into shares.
        return [
            (
                dataclasses.replace(plan, compressed=True, numel_compressed=plan.numel)
                if plan.lowered
                else plan
            )
            for plan in plans
        ]

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
        """Add to `factors` what other owners of the node have learned, and to `copies` the messages
        inside the node.
        """
        count, local = self.nodes.ranks_per_node, self.nodes.local_rank
        plans, buckets = (
            self.plans(compressor, plans),
            [self.plans(compressor, bucket) for bucket in buckets],
        )
        if compressor.elementwise:
            whole = compressor.memory_plan(plans, buckets)
            own = dataclasses.replace(whole, packed=-(-whole.packed // count))
        else:
            own = compressor.memory_plan(
                plans_of_owners(plans, self._owners, count)[local],
                [plans_of_owners(bucket, self._owners, count)[local] for bucket in buckets],
            )
        others = [plan for plan in plans if not self.keeps(plan.name)]
        learned = sum(
            field.size_bytes(plan) for field, plan in replicated_fields(compressor, others)
        )
        copies = 0
        for bucket in buckets:
            if any(plan.compressed for plan in bucket):
                shares = plans_of_owners(bucket, self._owners, count)
                gradients = [sum(plan.size_bytes() for plan in share) for share in shares]
                if compressor.elementwise:
                    gradients = equal_parts(sum(gradients), count)
                fields = [replicated_fields(compressor, share) for share in shares]
                sizes = [part_sizes(*each) for each in zip(gradients, fields, strict=True)]
                copies += sum(buffer_sizes(sizes, local)) + gradients[local]
        return dataclasses.replace(own, factors=own.factors + learned, copies=own.copies + copies)

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
        own = work.own
        # 1. Sum the node's gradients of this rank's share.
        gradients = work.by_owner(flat)
        yield Send(
            gradients,
            what="the node's gradients",
            op="all_to_all",
            splits=work.to_owners,
            into=work.gradients,
            over="intra_node",
        )
        count = self.nodes.ranks_per_node
        # A compressor with residuals gets the node's sum, and its result is divided afterwards; see
        # the module.
        before, after = (1, count) if state.local else (count, 1)
        first, *others = work.gradients.div_(before).view(count, own.numel())
        own.copy_(first)
        for each in others:  # add in this order, so that no bit depends on the bucket layout
            own.add_(each)

        # 2. Average it between the nodes.
        had_verdict = False
        if own.numel() > 0:
            task, answer = self._between_nodes(compressor, work, state, step), None
            while not isinstance(next_one := task.advance(answer), Done):
                if isinstance(next_one, Send):
                    next_one.over = "inter_node"
                else:
                    had_verdict = True
                answer = yield next_one
            if next_one.result is not own:
                own.copy_(next_one.result)
        if not had_verdict:
            yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
        own.div_(after)

        # 3. Send the result to the node. This follows the verdict, so the compressor's learned
        #    state is included.
        results = work.results(state)
        yield Send(
            results,
            what="the node's averages",
            op="gather",
            splits=work.from_owners,
            into=work.averages,
            over="intra_node",
        )
        work.take(flat, state)
        return None

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
        own, mine = work.own, self._between(step)
        if not compressor.transactional:
            return new_task(compressor, True, own, None, NO_STATE, mine)
        return new_task(compressor, work.compresses, own, work.work, state, mine)

    def _between(self, step: StepInfo) -> StepInfo:
        return StepInfo(
            step.number, self.nodes.count, step.residual_factor, self.nodes.inter_node.rank()
        )

    def _collect(
        self, tensors: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Sum the node's tensors of each parameter at its owner, if another rank has one: these
        ranks have loaded the checkpoint of a run with other nodes.
        """
        held = gather_held(tensors, parameters, self.nodes.intra_node)
        for place, (name, parameter) in enumerate(parameters.items()):
            if not any(row[place] for rank, row in enumerate(held) if rank != self._owners[name]):
                continue
            total = tensors.pop(name, None)
            if total is None:
                total = zeros_for(parameter)
            start(
                Send(total, what=f"the residual of {name} in the node"), self.nodes.intra_node, None
            ).wait()
            if self.keeps(name):
                tensors[name] = total


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot.offset:
            runs[-1] = (runs[-1][0], slot.stop)
        else:
            runs.append((slot.offset, slot.stop))
    return runs


def _layout_of(slots: Sequence[Slot], own: torch.Tensor) -> BucketLayout:
    offsets = itertools.accumulate((slot.numel for slot in slots), initial=0)
    moved = [
        Slot(slot.name, slot.parameter, at, slot.numel)
        for slot, at in zip(slots, offsets, strict=False)
    ]
    return BucketLayout(tuple(moved), own.numel(), own.dtype, own.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
