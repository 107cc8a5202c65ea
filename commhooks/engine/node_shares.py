"""The shares of one bucket that belong to the ranks of a node: buffers, and what they send each other."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.comm.nodes import Nodes
from commhooks.comm.wire import divide, join
from commhooks.compressors.base import Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot

Field = tuple[StateField, UnitPlan]
Splits = tuple[Sequence[int], Sequence[int]]
"""How many elements go to each rank, and come from each."""


def owners_of(sizes: Mapping[str, int], ranks_per_node: int) -> dict[str, int]:
    """The owner of each parameter: a local rank. The largest parameters come first, each to the rank with the fewest
    elements so far. It depends on the model only, not on its buckets.

    Args:
        sizes: name -> number of elements.
    """
    load = [0] * ranks_per_node
    owners = {}
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


def plans_of_owners(plans: Sequence[UnitPlan], owners: Mapping[str, int], ranks_per_node: int) -> list[list[UnitPlan]]:
    """The plans of each owner's parameters."""
    return [[plan for plan in plans if owners[plan.name] == owner] for owner in range(ranks_per_node)]


def replicated_fields(compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[Field]:
    """What is learned for these and equal on all ranks: the owner sends it to its node."""
    replicated = [each for each in compressor.state_fields if each.replicated]
    compressed = [plan for plan in plans if plan.compressed]
    # Not every unit has every field.
    return [(field, plan) for plan in compressed for field in replicated if field.size_bytes(plan)]


def part_sizes(gradient_bytes: int, fields: Sequence[Field]) -> list[int]:
    """Bytes of the parts of what an owner sends to each rank: gradients, fields, and a flag for each field."""
    return [gradient_bytes, *(field.size_bytes(plan) for field, plan in fields), len(fields)]


def buffer_sizes(sizes: Sequence[Sequence[int]], local_rank: int) -> tuple[int, int]:
    """Bytes of the memory for what this rank sends, and for what arrives. `sizes`: `part_sizes` of each owner."""
    count, own, total = len(sizes), sizes[local_rank], sum(each[0] for each in sizes)
    return max(total, sum(own)), max(count * own[0], sum(map(sum, sizes)))


class NodeShares:
    """The workspace of one bucket where ranks form nodes. The buffers are allocated once.

    Args:
        compressor: what is used between the nodes.
        layout, plans: of the whole bucket.
        owners: see `owners_of`.
        nodes: the nodes.

    Attributes:
        own: this rank's share of the gradients, 1-D.
        work: the compressor's workspace for it; None if nothing in it is compressed.
        compresses: whether anything in it is compressed.
        to_owners, from_owners: for `by_owner` (elements) and `results` (bytes).
        gradients, averages: memory for what comes from the ranks of the node: the parts of `own`, and their `results`.
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
        self._must_read_flags = precision.is_host_readable(layout.device) or compressor.needs_exact_step
        slots = [[slot for slot in layout.slots if owners[slot.name] == owner] for owner in range(count)]
        self._runs = [_runs(each) for each in slots]
        self._fields = [replicated_fields(compressor, mine) for mine in plans_of_owners(plans, owners, count)]
        numels = [sum(slot.numel for slot in each) for each in slots]
        gradient_bytes = [numel * layout.dtype.itemsize for numel in numels]
        self._sizes = [part_sizes(*each) for each in zip(gradient_bytes, self._fields, strict=True)]
        self.to_owners: Splits = (numels, [numels[local]] * count)
        self.from_owners: Splits = ([sum(self._sizes[local])], [sum(each) for each in self._sizes])
        # The gradients have arrived before the averages are sent: both use the same memory.
        total, share = layout.numel * layout.dtype.itemsize, gradient_bytes[local]
        results, averages = sum(self._sizes[local]), sum(map(sum, self._sizes))
        sent, arrived = (
            torch.zeros(size, dtype=torch.uint8, device=layout.device) for size in buffer_sizes(self._sizes, local)
        )
        self._by_owner = sent[:total].view(layout.dtype)
        self._results = sent[:results]
        self.gradients = arrived[: count * share].view(layout.dtype)
        self.averages = arrived[:averages]
        self.own = torch.zeros(numels[local], dtype=layout.dtype, device=layout.device)

        mine = [plan for plan in plans if owners[plan.name] == local]
        self.compresses = any(plan.compressed for plan in mine)
        self.work = compressor.workspace(_layout_of(slots[local], self.own), mine) if self.compresses else None

    def by_owner(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradients of the bucket, 1-D, those of each owner together."""
        join([flat[begin:end] for runs in self._runs for begin, end in runs], self._by_owner)
        return self._by_owner

    def results(self, state: LearnedState) -> torch.Tensor:
        """What this rank sends to all ranks of the node (uint8): `own`, the replicated tensors that the compressor has
        learned for it, and a flag for each of these: whether there is one."""
        fields = self._fields[self._local_rank]
        pieces = self._results.split(self._sizes[self._local_rank])
        pieces[0].copy_(self.own.view(torch.uint8))
        for (field, plan), piece in zip(fields, pieces[1:-1], strict=True):
            learned = state[field.key].get(plan.key)
            if learned is not None:
                piece.copy_(_bytes(learned))
        if fields:
            pieces[-1].copy_(torch.tensor([plan.key in state[field.key] for field, plan in fields], dtype=torch.uint8))
        return self._results

    def take(self, flat: torch.Tensor, state: LearnedState) -> None:
        """Write the results of all ranks of the node, which are in `averages`, into the bucket and into the learned
        state."""
        size = flat.element_size()
        bucket = flat.view(torch.uint8)
        for owner, message in enumerate(self.averages.split(list(self.from_owners[1]))):
            gradients, *learned, flags = message.split(self._sizes[owner])
            if self._runs[owner]:
                divide(gradients, [bucket[begin * size : end * size] for begin, end in self._runs[owner]])
            if owner != self._local_rank and learned:
                self._learn(self._fields[owner], learned, flags, state)

    def _learn(
        self, fields: Sequence[Field], learned: Sequence[torch.Tensor], flags: torch.Tensor, state: LearnedState
    ) -> None:
        complete = all(plan.key in state[field.key] for field, plan in fields)
        # On an accelerator, what is there stays there: nothing waits for the flags except in the first steps.
        there = flags.tolist() if self._must_read_flags or not complete else [1] * len(fields)
        for (field, plan), new, is_there in zip(fields, learned, there, strict=True):
            known = state[field.key]
            if not is_there:
                known.pop(plan.key, None)
                continue
            if plan.key not in known:
                known[plan.key] = torch.empty(field.shape(plan), dtype=field.dtype(plan), device=new.device)
            _bytes(known[plan.key]).copy_(new)


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The slots (in the order of the bucket) as intervals, those that touch as one."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot.offset:
            runs[-1] = (runs[-1][0], slot.stop)
        else:
            runs.append((slot.offset, slot.stop))
    return runs


def _layout_of(slots: Sequence[Slot], own: torch.Tensor) -> BucketLayout:
    """The layout of `own`, in which these slots lie one after another."""
    offsets = itertools.accumulate((slot.numel for slot in slots), initial=0)
    moved = [Slot(slot.name, slot.parameter, at, slot.numel) for slot, at in zip(slots, offsets, strict=False)]
    return BucketLayout(tuple(moved), own.numel(), own.dtype, own.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous `tensor` as a view of bytes, 1-D."""
    return tensor.view(-1).view(torch.uint8)
