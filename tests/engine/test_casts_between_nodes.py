"""Hooks without learned state are exact inside a node and cast between nodes."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.gradients.names import ModelNames
from commhooks.hook.request_check import kernel_support
from commhooks.request import HookRequest
from tests.support.training import Run, make_model

CASTS: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {
    "allreduce": ({"hook": "allreduce"}, None),
    "bf16": ({"hook": "bf16"}, torch.bfloat16),
    "fp16": ({"hook": "fp16"}, torch.float16),
    "fp16 wrapper": ({"hook": "allreduce", "wrapper": "fp16"}, torch.float16),
}


def _cast(how: str, ranks_per_node: int, factor: float) -> dict[str, Any]:
    """A step on gradients of about `factor`. `alone`: those of this rank."""
    arguments = CASTS[how][0]
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    hook = commhooks.attach(ddp, **arguments, ranks_per_node=ranks_per_node)
    batch = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))

    def gradients() -> torch.Tensor:
        ddp.zero_grad()
        (factor * ddp(batch).mean()).backward()
        return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])

    with ddp.no_sync():
        alone = gradients()
    for _ in range(3):
        averaged = gradients()
    return {"alone": alone, "averaged": averaged, "stats": hook.stats(), "plan": hook.plan()}


@pytest.mark.parametrize(
    ("how", "world_size", "ranks_per_node"), [("bf16", 6, 3), ("fp16 wrapper", 4, 2)]
)
def test_numbers_are_cast_between_nodes_only(
    run_ranks: Any, how: str, world_size: int, ranks_per_node: int
) -> None:
    """Exact inside a node: the mean of a node is rounded once, as is the mean of the nodes."""
    ranks = run_ranks(_cast, how, ranks_per_node, 1.0, world_size=world_size)
    alone = torch.stack([rank["alone"] for rank in ranks]).view(
        -1, ranks_per_node, ranks[0]["alone"].numel()
    )
    count = world_size // ranks_per_node
    low = CASTS[how][1]
    nodes = torch.zeros_like(alone[:, 0])
    for place in range(ranks_per_node):  # in the order of the ranks
        nodes += alone[:, place] / ranks_per_node
    wanted = nodes.to(low).div_(count).sum(0).float() if low is not None else (nodes / count).sum(0)
    for rank in ranks:
        assert torch.equal(rank["averaged"], ranks[0]["averaged"])
        assert torch.equal(rank["averaged"], wanted)
        assert (
            rank["plan"].arrangement
            == f"between {count} nodes of {ranks_per_node} ranks, each as one rank"
        )
        assert rank["stats"]["step"] == 3 and rank["stats"]["backward_passes"] == 3
        assert rank["stats"]["bytes_inside_nodes"] > 0 and rank["plan"].memory.copies > 0
    collectives = sum(rank["stats"]["collectives_last_pass"] for rank in ranks[:ranks_per_node])
    assert collectives > 3, "several buckets"
    sent = [rank["stats"]["bytes_sent_last_pass"] for rank in ranks[:ranks_per_node]]
    assert sum(sent) == ranks[0]["plan"].bytes_after
    most = 4 * rank["stats"]["collectives_last_pass"]
    assert max(sent) - min(sent) <= most, "the ranks of a node have equal parts of every bucket"


class _TwoWeights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Linear(4, 3, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


def _large(how: str, dtype: torch.dtype) -> torch.Tensor:
    ddp = torch.nn.parallel.DistributedDataParallel(_TwoWeights().to(dtype), bucket_cap_mb=0.00001)
    hook = commhooks.attach(ddp, **CASTS[how][0], ranks_per_node=2)
    for _ in range(2):  # from the second pass on there are two buckets
        ddp.zero_grad()
        (40000 * ddp(torch.eye(4, dtype=dtype))).sum().backward()
    assert hook.stats()["collectives_last_pass"] == 2  # half of each bucket
    return torch.stack([p.grad.float() for p in ddp.parameters() if p.grad is not None])


@pytest.mark.parametrize(("how", "dtype"), [("fp16", torch.float32), ("allreduce", torch.float16)])
def test_a_cast_gets_the_mean_of_a_node(run_ranks: Any, how: str, dtype: torch.dtype) -> None:
    """Its sum would leave the range of float16."""
    for gradient in run_ranks(_large, how, dtype, world_size=4):
        assert torch.equal(gradient, torch.full((2, 3, 4), 40000.0).to(dtype).float())


def test_a_cast_passes_on_what_is_not_finite(run_ranks: Any) -> None:
    """As without nodes: a GradScaler skips the step, on all ranks."""
    ranks = run_ranks(_cast, "fp16", 2, 1e9, world_size=4)
    assert all(not rank["averaged"].isfinite().all() for rank in ranks)
    assert all(
        torch.equal(rank["averaged"].isfinite(), ranks[0]["averaged"].isfinite()) for rank in ranks
    )


def _continued(
    ranks_per_node: int | None, saved: dict[str, Any] | None
) -> tuple[dict[str, Any], int]:
    run = Run.new(hook="bf16", ranks_per_node=ranks_per_node)
    if saved is not None:
        run.load(copy.deepcopy(saved))
    run.train(2)
    return copy.deepcopy(run.save()), run.hook.stats()["step"]


def test_a_cast_is_saved_as_without_nodes(run_ranks: Any) -> None:
    saved, flat = None, None
    for part, ranks_per_node in enumerate((2, None, 2), start=1):
        answers = run_ranks(_continued, ranks_per_node, saved, world_size=4)
        assert [step for _, step in answers] == [2 * part] * 4
        if part == 2:  # both went on from two steps with nodes
            flat = answers[0][0]["hook"]
            nodes = run_ranks(_continued, 2, saved, world_size=4)[0][0]["hook"]
            for content in (flat, nodes):
                content["counters"] = {**content["counters"], "bytes_sent": 0, "collectives": 0}
            assert nodes == flat
        saved = answers[0][0]


def _one_node(ranks_per_node: int | None) -> tuple[str, str, torch.Tensor]:
    run = Run.new(hook="bf16", ranks_per_node=ranks_per_node).train(3)
    return type(run.hook._hook).__name__, str(run.hook.plan()), run.weights()


def test_one_node_is_as_none(run_ranks: Any) -> None:
    for one, none in zip(run_ranks(_one_node, 2), run_ranks(_one_node, None), strict=True):
        assert one[:2] == none[:2] and torch.equal(one[2], none[2])


def test_parameters_on_several_devices_are_refused_when_it_is_attached() -> None:
    parameters = {"here": torch.zeros(2), "there": torch.zeros(2, device="meta")}
    request = HookRequest.parse("bf16")
    names = ModelNames(parameters.items(), {})
    compressor = request.new_compressor()
    assert compressor is not None
    source: Any = SimpleNamespace(names=names)
    assert kernel_support(request, compressor, source).cannot == ""
    problem = kernel_support(HookRequest.parse("bf16", ranks_per_node=2), compressor, source).cannot
    assert "are on cpu, meta" in problem and problem.endswith(
        "'bf16_compress', without ranks_per_node"
    )
