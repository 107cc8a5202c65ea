"""Ranks in nodes compute what they compute without nodes, and load either kind of checkpoint."""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.comm.collectives import PointToPoint
from tests.support.features import complex_on_gloo
from tests.support.inside import session_of
from tests.support.models import masks
from tests.support.training import Run, make_model, residuals

RANDOM_K = "examples.random_k:RandomKCompressor"
POWERSGD: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
STEPS = 4
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "powerSGD": ("powerSGD", POWERSGD),
    "random_k": (RANDOM_K, {"share": 0.2, "start_iter": 2}),
    "int8": ("int8", {"block_size": 32, "start_iter": 2}),
}


def _new(kind: str, ranks_per_node: Any, **more: Any) -> Run:
    hook, options = KINDS[kind]
    return Run.new(hook=hook, hook_options=options, ranks_per_node=ranks_per_node, **more)


# ---- the same numbers, a share of the work -------------------------------------------------------


def _both(kind: str, masked: bool) -> dict[str, Any]:
    # gloo has messages on the CPU only
    messages = (
        mock.patch.object(PointToPoint, "applies_to", return_value=False)
        if masked
        else contextlib.nullcontext()
    )
    with masks(masked), messages:
        flat, nodes = (
            _new(kind, ranks_per_node, model=make_model(torch.float64))
            for ranks_per_node in (None, 2)
        )
        for run in (flat, nodes):
            run.optimizer.param_groups[0]["lr"] = 0.0  # so that both always have the same gradients
            run.train(STEPS)
        learned = session_of(nodes.hook).state
        return {
            "flat": flat.gradients,
            "nodes": nodes.gradients,
            "weights": nodes.weights(),
            "residuals": residuals(nodes.hook),
            "stats": nodes.hook.stats(),
            "plan": nodes.hook.plan().as_dict(),
            "flat_stats": flat.hook.stats(),
            "learned": {n: q.clone() for n, q in learned["q"].items()},
        }


def _far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("kind", "masked"),
    [("powerSGD", False), ("powerSGD", True), ("int8", True)],
)
def test_results_are_those_without_nodes(run_ranks: Any, kind: str, masked: bool) -> None:
    """`masked`: as on an accelerator, the host reads nothing, and the collectives are gloo's."""
    ranks = run_ranks(_both, kind, masked, world_size=4)
    first = ranks[0]
    # int8 rounds what leaves a node, not what leaves a rank: other noise.
    limit = 1e-11 if kind != "int8" else 2e-2
    for rank in ranks:
        assert torch.equal(rank["weights"], first["weights"])
        assert rank["stats"]["compressed_steps"] == STEPS - 2
        for got, wanted in zip(rank["nodes"], rank["flat"], strict=True):
            assert _far(got, wanted) < limit
    node = ranks[:2]
    names = [name for rank in node for name in rank["residuals"]]
    compressed = {row["name"] for row in first["plan"]["parameters"] if row["compressed"]}
    assert sorted(names) == sorted(compressed), "each parameter has one owner in a node"
    assert len([rank for rank in node if rank["residuals"]]) > 1
    flat = first["flat_stats"]["bytes_sent_last_pass"]
    together = sum(rank["stats"]["bytes_sent_last_pass"] for rank in node)
    assert 0.8 * flat < together < 1.2 * flat, "a node sends what a rank sends without nodes"
    assert all(rank["stats"]["bytes_inside_nodes"] > 0 for rank in node)
    for rank in ranks:  # what has been learned is everywhere
        assert rank["learned"].keys() == first["learned"].keys()
        assert all(
            torch.equal(rank["learned"][key], tensor) for key, tensor in first["learned"].items()
        )


def _memory(kind: str) -> dict[str, Any]:
    run = _new(kind, 2).train(5)
    session = session_of(run.hook)
    shares = [bucket.work for bucket in session.consensus.buckets if bucket.compressed]
    plan = run.hook.plan()
    return {
        "residuals": sum(residual.nbytes for residual in residuals(run.hook).values()),
        "learned": sum(t.nbytes for t in session.state["q"].values()),
        "buffers": sum(
            t.untyped_storage().nbytes() for s in shares for t in (s._results, s.averages, s.share)
        ),
        "results once": all(
            len(s.results(session.state)) == s.from_owners[1][s._local_rank] for s in shares
        ),
        "plan": plan.memory,
        "alone": session.compressor.memory_plan(plan.parameters, [plan.parameters]),
        "title": str(plan).splitlines()[0].strip(),
    }


@pytest.mark.parametrize("kind", ["powerSGD", "int8"])
def test_the_plan_shows_what_a_rank_of_a_node_needs(run_ranks: Any, kind: str) -> None:
    ranks = run_ranks(_memory, kind, world_size=4)
    for rank in ranks:
        assert rank["title"].endswith(
            "from step 2 on, between 2 nodes of 2 ranks, each as one rank"
        )
        assert rank["plan"].residual == rank["residuals"] > 0
        assert rank["learned"] <= rank["plan"].factors and rank["buffers"] <= rank["plan"].copies
        assert rank["buffers"] > 0.5 * rank["plan"].copies
        assert rank["results once"], "what all ranks of the node get needs no copy for each of them"
    assert sum(rank["plan"].residual for rank in ranks[:2]) == ranks[0]["alone"].residual


def _norms() -> dict[str, Any]:
    run = _new("powerSGD", 2).train(5)
    of_share = residuals(run.hook)
    gradients = {
        name: p.grad.clone() for name, p in run.ddp.module.named_parameters() if p.grad is not None
    }
    return {
        "norms": run.hook.norms(),
        "residuals": of_share,
        "gradients": {name: gradients[name] for name in of_share},
    }


def test_norms_are_those_of_the_share(run_ranks: Any) -> None:
    """Otherwise the residual of a share would be divided by the gradient of everything."""
    for rank in run_ranks(_norms, world_size=4):
        residual = (
            float(torch.cat([residual.flatten() for residual in rank["residuals"].values()]).norm())
            / 2
        )
        gradient = float(
            torch.cat([tensor.flatten() for tensor in rank["gradients"].values()]).norm()
        )
        assert rank["norms"]["residual_norm"] == pytest.approx(residual, rel=1e-5) and residual > 0
        assert rank["norms"]["gradient_norm"] == pytest.approx(gradient, rel=1e-5)


# ---- checkpoints ---------------------------------------------------------------------------------


def _saved(
    kind: str, ranks_per_node: int | None, residual: str
) -> tuple[dict[str, Any], torch.Tensor]:
    run = _new(kind, ranks_per_node).train(4)
    saved = run.save(residual=residual)
    return copy.deepcopy(saved), run.train(2).weights()


def _resumed(
    kind: str, ranks_per_node: int | None, saved: list[dict[str, Any]]
) -> tuple[torch.Tensor, list[str]]:
    mine = copy.deepcopy(saved[dist.get_rank() % len(saved)])
    run = _new(kind, ranks_per_node).load(mine).train(2)
    assert run.hook.stats()["step"] == 6
    return run.weights(), sorted(residuals(run.hook))


def test_resume_is_bit_equal(run_ranks: Any) -> None:
    before = run_ranks(_saved, "int8", 2, "per_rank", world_size=4)
    assert all(saved["hook"]["exact"] for saved, _ in before)
    after = run_ranks(_resumed, "int8", 2, [saved for saved, _ in before], world_size=4)
    assert all(
        torch.equal(weights, whole) for (weights, _), (_, whole) in zip(after, before, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "residual", "before", "after", "ranks"),
    [("powerSGD", "mean", None, 2, 4), ("random_k", "per_rank", 3, 2, 6)],
)
def test_another_arrangement_resumes(
    run_ranks: Any, kind: str, residual: str, before: Any, after: Any, ranks: int
) -> None:
    """With the residuals of every rank too: they are added up where they are needed."""
    first = run_ranks(_saved, kind, before, residual, world_size=ranks)
    resumed = run_ranks(_resumed, kind, after, [saved for saved, _ in first], world_size=ranks)
    for (weights, kept), (_, whole) in zip(resumed, first, strict=True):
        assert _far(weights, whole) < 1e-6
        assert set(kept).isdisjoint(resumed[0][1]) or kept == resumed[0][1]


@pytest.mark.parametrize(("before", "after"), [((4, 2), (2, None)), ((2, None), (4, 2))])
def test_another_number_of_ranks_resumes(run_ranks: Any, before: Any, after: Any) -> None:
    first = run_ranks(_saved, "powerSGD", before[1], "mean", world_size=before[0])
    mean = {name: entry["residual"] for name, entry in first[0][0]["hook"]["parameters"].items()}
    ranks = run_ranks(_mean_before_the_first_pass, after[1], first[0][0], world_size=after[0])
    for name, residual in mean.items():
        parts = [rank[name] for rank in ranks if name in rank]
        assert (residual is None) == (not parts)
        if residual is not None:
            total = torch.stack(parts).sum(0) / after[0]
            assert torch.allclose(total.flatten(), residual.flatten(), rtol=1e-6, atol=0)


def _mean_before_the_first_pass(
    ranks_per_node: int | None, saved: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The residuals that take part in the first step after a load."""
    run = _new("powerSGD", ranks_per_node).load(copy.deepcopy(saved))
    session = session_of(run.hook)
    names = session.consensus.binding.names.named_parameters()
    group = session.consensus.binding.group()
    session.consensus.reduction.redistribute_residuals(session.state, names, group)
    return residuals(run.hook)


def _gathered() -> bool:
    run = _new("powerSGD", 2).train(5)
    saved = run.save(residual="per_rank", gather=True)
    again = _new("powerSGD", 2).load(copy.deepcopy(saved)).train(3)
    return saved["hook"]["exact"] and torch.equal(run.train(3).weights(), again.weights())


def test_one_file_with_the_residuals_of_all_ranks_resumes(run_ranks: Any) -> None:
    assert all(run_ranks(_gathered, world_size=4))


def _two_layers(ranks_per_node: int | None, saved: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The state after a pass over two equal layers. After a load that pass is not finite, and the
    mean is saved.
    """
    torch.manual_seed(3)
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(2)))
    )
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, ranks_per_node=ranks_per_node)
    if saved is not None:
        hook.load_state_dict(saved[dist.get_rank()])
    inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp(inputs if saved is None else inputs * float("inf")).square().mean().backward()
    return copy.deepcopy(hook.state_dict("per_rank" if saved is None else "mean"))


def test_the_mean_is_saved_before_a_rank_has_residuals_of_the_other_shares(run_ranks: Any) -> None:
    """A run between nodes goes on without them, and no step was committed yet."""
    before = run_ranks(_two_layers, 2, None, world_size=4)
    for saved in run_ranks(_two_layers, None, before, world_size=4):
        assert saved["exact"] and saved["nonfinite_steps"] == 1
        for name in ("0.weight", "1.weight"):
            saved_residuals = [payload["parameters"][name]["residual"] for payload in before]
            mean = sum(part[0] for part in saved_residuals if part is not None) / 4
            assert mean.any() and torch.allclose(saved["parameters"][name]["residual"], mean)


# ---- what is not finite, what fails --------------------------------------------------------------


def _spoilt(kind: str, bad_rank: int) -> dict[str, Any]:
    run = _new(kind, 2).train(4)
    before = {name: residual.clone() for name, residual in residuals(run.hook).items()}
    run.optimizer.zero_grad()
    # In one parameter only, which one rank of each node compresses.
    value = float("nan") if dist.get_rank() == bad_rank else 1.0
    last = run.ddp.module[-1].weight.register_hook(lambda gradient: gradient * value)
    run.ddp(torch.full((8, 1, 8, 8), 0.5)).square().sum().backward()
    last.remove()
    finite = all(bool(p.grad.isfinite().all()) for p in run.ddp.parameters() if p.grad is not None)
    after = residuals(run.hook)
    return {
        "finite": finite,
        "same": all(torch.equal(after[name], residual) for name, residual in before.items()),
        "skipped": run.hook.stats()["nonfinite_steps"],
        "weights": run.train(2).weights(),
        "clean": _new(kind, 2).train(6).weights(),
    }


def test_a_step_that_is_not_finite_changes_nothing_on_any_node(run_ranks: Any) -> None:
    for rank in run_ranks(_spoilt, "powerSGD", 3, world_size=4):
        assert not rank["finite"] and rank["same"] and rank["skipped"] == 1
        assert torch.equal(rank["weights"], rank["clean"])


class _TwoParts(torch.nn.Module):
    """The second part is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


def _idle(ranks_per_node: int | None, hook: str = "powerSGD") -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = _TwoParts()
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=0.001
    )
    options = (
        {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1} if hook == "powerSGD" else None
    )
    commhooks.attach(ddp, hook, hook_options=options, check_every=2, ranks_per_node=ranks_per_node)
    results = []
    for step in range(4):
        model.both = step % 2 == 0
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(4, 20, generator=generator)).square().mean().backward()
        results.append(
            torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        )
    return results


@pytest.mark.parametrize("hook", ["powerSGD", "allreduce"])
def test_layers_that_are_not_used_in_every_step_are_averaged(run_ranks: Any, hook: str) -> None:
    flat, nodes = (
        run_ranks(_idle, ranks_per_node, hook, world_size=4) for ranks_per_node in (None, 2)
    )
    for one, other in zip(flat, nodes, strict=True):
        assert all(_far(got, wanted) < 1e-6 for got, wanted in zip(other, one, strict=True))


class _Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(30, 8, sparse=True)
        self.last = torch.nn.Linear(8, 4, dtype=torch.complex64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens).to(torch.complex64)).abs()


def _sparse_and_complex(ranks_per_node: int | None, hook: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    ddp = torch.nn.parallel.DistributedDataParallel(_Tokens(), bucket_cap_mb=0.0001)
    commhooks.attach(ddp, hook, ranks_per_node=ranks_per_node)
    for step in range(3):
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randint(30, (6,), generator=generator)).square().mean().backward()
    results = [
        p.grad.to_dense() if p.grad.is_sparse else p.grad
        for p in ddp.parameters()
        if p.grad is not None
    ]
    return [
        torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in results
    ]


@complex_on_gloo
@pytest.mark.parametrize("hook", ["allreduce", "int8"])
def test_sparse_and_complex_gradients_are_averaged(run_ranks: Any, hook: str) -> None:
    flat, nodes = (
        run_ranks(_sparse_and_complex, ranks_per_node, hook, world_size=4)
        for ranks_per_node in (None, 2)
    )
    for one, other in zip(flat, nodes, strict=True):
        assert len(one) == 3 and all(
            _far(got, wanted) < 1e-6 for got, wanted in zip(other, one, strict=True)
        )
