"""`diloco` with `ranks_per_node`: the exact mean of the gradients inside a node, outer steps
between nodes.
"""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.local_steps import flat_weights
from commhooks.local_steps.reference import ReferenceDiLoCo
from tests.support.training import Run, batch, flat, make_model

SEVERAL = 1000  # bytes in a bucket of weights, so that there are several
NODES, PER_NODE = 2, 2


def _of_the_paper(every: int, steps: int, momentum: float) -> list[torch.Tensor]:
    """The weights of each node after `steps`, in one process: a node is one rank with the gradients
    of its ranks.
    """
    models = [make_model() for _ in range(NODES)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    reference = ReferenceDiLoCo(flat(models[0].parameters()), 0.7, momentum)
    for step in range(steps):
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
                images, labels = batch(step, rank)
                (nn.functional.cross_entropy(model(images), labels) / PER_NODE).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            new = reference.step([flat(model.parameters()) for model in models]).float()
            for model in models:
                torch.nn.utils.vector_to_parameters(new.clone(), model.parameters())
    return [flat(model.parameters()) for model in models]


@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _train(every: int, steps: int) -> Any:
    config = commhooks.DiLoCo(sync_every=every, wire="float32", outer_lr=0.7, outer_momentum=0.5)
    run = Run.new(hook=config, ranks_per_node=PER_NODE)
    sent, sizes = [], set()
    all_reduce = dist.all_reduce

    def noted(*args: Any, group: dist.ProcessGroup, **how: Any) -> Any:
        sizes.add(group.size())
        return all_reduce(*args, group=group, **how)

    for _ in range(steps):
        before = run.hook.stats()["bytes_sent"]
        with mock.patch.object(dist, "all_reduce", noted):
            run.train(1)
        sent.append(run.hook.stats()["bytes_sent"] - before)
    own, gradient = run.weights(), run.gradients[-1]
    run.hook.synchronize()
    assert sizes == {PER_NODE} == {NODES}  # gradients inside a node, weights with one rank of each
    return own, gradient, run.weights(), sent, run.hook.stats(), run.hook.plan()


def test_a_node_is_one_rank(run_ranks):
    found = run_ranks(_train, 3, 8, world_size=NODES * PER_NODE)
    size = 4 * sum(p.numel() for p in make_model().parameters())
    plain = _of_the_paper(3, 8, 0.5)
    for rank, (own, gradient, common, sent, stats, plan) in enumerate(found):
        assert (own - plain[rank // PER_NODE]).abs().max() < 1e-6
        # alike in its node, to the last bit
        assert torch.equal(own, found[rank // PER_NODE * PER_NODE][0])
        assert torch.equal(gradient, found[rank // PER_NODE * PER_NODE][1])
        assert torch.equal(common, found[0][2])
        assert sent == [0, 0, size, 0, 0, size, 0, 0]
        assert stats["bytes_inside_nodes"] == 8 * size
        assert "between 2 nodes of 2 ranks" in plan.arrangement
    assert not torch.equal(found[0][0], found[2][0]) and not torch.equal(found[0][1], found[2][1])


@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _resumed(config: commhooks.DiLoCo, residual: str) -> Any:
    whole, resumed = (Run.new(hook=config, ranks_per_node=PER_NODE).train(5) for _ in range(2))
    whole.save(residual=residual)
    content = resumed.save(residual=residual)
    everywhere = [content]
    dist.broadcast_object_list(everywhere)
    content = everywhere[0] | {"hook": content["hook"]}
    resumed = Run.new(hook=config, ranks_per_node=PER_NODE).load(content).train(5)
    flat_one = Run.new(hook=config).load(content).train(5)  # another arrangement goes on from it
    flat_one.hook.synchronize()
    return whole.train(5).weights(), resumed.weights(), flat_one.weights()


def test_a_run_that_resumes_in_mid_round_is_bit_equal(run_ranks):
    config = commhooks.DiLoCo(sync_every=4, fragments=2, delay=1, outer_momentum=0.3)
    found = run_ranks(_resumed, config, "mean", world_size=NODES * PER_NODE)
    for whole, resumed, flat_one in found:
        assert torch.equal(whole, resumed)
        differences = [float((each[2] - found[0][2]).abs().max()) for each in found]
        assert torch.equal(flat_one, found[0][2]) and flat_one.isfinite().all(), differences
    assert not torch.equal(found[0][0], found[2][0])  # in mid-round


def _not_finite_on_one_rank() -> Any:
    """A weight of one rank alone, in the last step of a round."""
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3), ranks_per_node=PER_NODE).train(3)
    good = run.weights()
    run.train(2)
    images, labels = batch(run.step, dist.get_rank())
    nn.functional.cross_entropy(run.ddp(images), labels).backward()
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(run.ddp.parameters())[0] = torch.nan
    run.optimizer.step()
    return good, run.weights(), run.hook.stats()


def test_one_verdict_for_all_ranks_of_all_nodes(run_ranks):
    for good, after, stats in run_ranks(_not_finite_on_one_rank, world_size=NODES * PER_NODE):
        assert torch.equal(good, after) and (stats["step"], stats["nonfinite_steps"]) == (1, 1)
