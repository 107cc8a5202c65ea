"""Ranks in nodes: exact inside a node, compressed between nodes.

Every parameter has an owner in each node: the rank with a certain local rank. For one bucket:

    each rank sends each gradient to its owner in the node, which adds up those of the node
    the owners in all nodes average these sums, as the compressor does
    each owner sends the average, and what the compressor has learned, to the other ranks of its node

So each rank compresses its share of the parameters only, and keeps residuals for it.

With a compressor that keeps residuals, an owner works on the sum of its node, not on its mean, and divides the result
at the end. The residual then is what it would be if the other ranks of the node had gradients and residuals of zero:
the mean over all ranks means the same as without nodes, and checkpoints do not depend on the arrangement. A compressor
without residuals gets the node's mean, which float16 has more room for.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Send, start
from commhooks.comm.nodes import Nodes
from commhooks.compressors.base import Compressor, Exchange, StepInfo, Verdict
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.arrangement import Flat, gather_held, zeros_for
from commhooks.engine.average import new_task
from commhooks.engine.immediate import NO_STATE
from commhooks.engine.node_shares import (
    NodeShares,
    buffer_sizes,
    owners_of,
    part_sizes,
    plans_of_owners,
    replicated_fields,
)
from commhooks.engine.state import LearnedState
from commhooks.engine.task import Done, ExchangeTask
from commhooks.gradients.layout import BucketLayout


class Hierarchy(Flat):
    """
    Args:
        nodes: the nodes.
        parameters: name -> parameter of the whole model, in an order that is the same on all ranks.
    """

    complete = False

    def __init__(self, nodes: Nodes, parameters: Mapping[str, torch.Tensor]) -> None:
        self.nodes = nodes
        self.words = nodes.words
        self.ranks_per_residual = nodes.ranks_per_node
        self.groups = {"node": lambda: nodes.node, "nodes": lambda: nodes.across}
        self._owners = owners_of({name: each.numel() for name, each in parameters.items()}, nodes.ranks_per_node)

    def keeps(self, name: str) -> bool:
        return self._owners[name] == self.nodes.local_rank

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        if compressor.transactional:
            return list(plans)
        # Without learned state all parameters take part, but for sparse gradients, which cannot be shared out.
        return [
            dataclasses.replace(plan, compressed=True, numel_compressed=plan.numel) if plan.lowered else plan
            for plan in plans
        ]

    def workspace(self, compressor: Compressor[Any], layout: BucketLayout, plans: Sequence[UnitPlan]) -> NodeShares:
        return NodeShares(compressor, layout, plans, self._owners, self.nodes)

    def memory_plan(
        self, compressor: Compressor[Any], plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        """`factors`: with what the other owners of the node have learned. `copies`: with what the ranks of a node send
        each other."""
        count, local = self.nodes.ranks_per_node, self.nodes.local_rank
        plans, buckets = self.plans(compressor, plans), [self.plans(compressor, bucket) for bucket in buckets]
        own = compressor.memory_plan(
            plans_of_owners(plans, self._owners, count)[local],
            [plans_of_owners(bucket, self._owners, count)[local] for bucket in buckets],
        )
        others = [plan for plan in plans if not self.keeps(plan.name)]
        learned = sum(field.size_bytes(plan) for field, plan in replicated_fields(compressor, others))
        copies = 0
        for bucket in buckets:
            if any(plan.compressed for plan in bucket):
                shares = plans_of_owners(bucket, self._owners, count)
                gradients = [sum(plan.size_bytes() for plan in share) for share in shares]
                fields = [replicated_fields(compressor, share) for share in shares]
                sizes = [part_sizes(*each) for each in zip(gradients, fields, strict=True)]
                copies += sum(buffer_sizes(sizes, local)) + gradients[local]
        return dataclasses.replace(own, factors=own.factors + learned, copies=own.copies + copies)

    def exchange(
        self, compressor: Compressor[Any]
    ) -> Callable[[torch.Tensor, NodeShares, LearnedState, StepInfo], Exchange]:
        return functools.partial(self._shared_exchange, compressor)

    def _shared_exchange(
        self, compressor: Compressor[Any], flat: torch.Tensor, work: NodeShares, state: LearnedState, step: StepInfo
    ) -> Exchange:
        own = work.own
        gradients = work.by_owner(flat)
        yield Send(
            gradients,
            what="the node's gradients",
            op="all_to_all",
            splits=work.to_owners,
            into=work.gradients,
            over="node",
        )
        count = self.nodes.ranks_per_node
        before, after = (1, count) if state.local else (count, 1)
        first, *others = work.gradients.div_(before).view(count, own.numel())
        own.copy_(first)
        for each in others:  # in this order, so that no bit depends on the bucket
            own.add_(each)

        judged = False
        if own.numel() > 0:
            task, answer = self._between_nodes(compressor, work, state, step), None
            while not isinstance(next_one := task.advance(answer), Done):
                if isinstance(next_one, Send):
                    next_one.over = "nodes"
                else:
                    judged = True
                answer = yield next_one
            if next_one.result is not own:
                own.copy_(next_one.result)
        if not judged:
            yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
        own.div_(after)

        results = work.results(state)
        yield Send(
            results, what="the node's averages", op="gather", splits=work.from_owners, into=work.averages, over="node"
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
        self, compressor: Compressor[Any], work: NodeShares, state: LearnedState, step: StepInfo
    ) -> ExchangeTask:
        """The exchange of this rank's share of a bucket."""
        own, mine = work.own, StepInfo(step.number, self.nodes.count, step.residual_factor, self.nodes.across.rank())
        if not compressor.transactional:
            return new_task(compressor, True, own, None, NO_STATE, mine)
        return new_task(compressor, work.compresses, own, work.work, state, mine)

    def _collect(self, tensors: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Add up, at its owner, what the ranks of this node have for each parameter, if any other rank has something.
        That comes from a checkpoint of another arrangement."""
        held = gather_held(tensors, parameters, self.nodes.node)
        for place, (name, parameter) in enumerate(parameters.items()):
            if not any(row[place] for rank, row in enumerate(held) if rank != self._owners[name]):
                continue
            total = tensors.pop(name, None)
            if total is None:
                total = zeros_for(parameter)
            start(Send(total, what=f"the residual of {name} in the node"), self.nodes.node, None).wait()
            if self.keeps(name):
                tensors[name] = total
