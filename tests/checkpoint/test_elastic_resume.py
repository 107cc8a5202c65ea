"""Resume with another number of ranks, from any of 1, 2 and 4 to any of them.

Every step has the same twelve samples, shared out among the ranks there are. A step depends on the residuals only
through their mean, so a run that changes its number of ranks must follow one that never does, to rounding.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.checkpoint import payload as payload_parts
from tests.support.training import Run, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
WORLDS = (1, 2, 4)
SAMPLES = 12


def _samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten kinds of noisy 8 x 8 images, and which kind each is."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return kinds[labels] + 0.8 * torch.randn(count, 1, 8, 8, generator=generator), labels


def _train(run: Run, steps: int) -> Run:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        images, labels = _samples(100_000 + run.step, SAMPLES)
        run.optimizer.zero_grad()
        own = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        torch.nn.functional.cross_entropy(run.ddp(images[own]), labels[own]).backward()
        run.optimizer.step()
        run.step += 1
    return run


def _save(run: Run, how: str) -> Any:
    """ "gathered": the residuals of all ranks in one payload; "parts": one file for all and one per rank. The mean:
    test_every_compressor.py."""
    saved = run.save(residual="per_rank", gather=how == "gathered")
    if how == "parts":
        saved["hook"] = payload_parts.split(saved["hook"], dist.get_rank())
    return saved


def _load(run: Run, saved: list[Any], how: str) -> Run:
    """`saved`: what `_save` returned, by rank of the world that saved."""
    content = saved[0]
    if how == "parts":
        shared, rank, world_size = saved[0]["hook"][0], dist.get_rank(), dist.get_world_size()
        needed = payload_parts.ranks_needed(shared, rank, world_size)
        parts = [saved[each]["hook"][1] for each in needed]
        content = {**content, "hook": payload_parts.merge(shared, parts, rank, world_size)}
    return run.load(content)


def _assert_same_mean(before: list[dict[str, torch.Tensor]], after: list[dict[str, torch.Tensor]]) -> None:
    """Of every parameter's residual over the ranks, to rounding."""
    assert len(before[0]) == 4 and all(each.keys() == before[0].keys() for each in before + after)
    for name in before[0]:
        old = torch.stack([each[name] for each in before]).double().mean(0)
        new = torch.stack([each[name] for each in after]).double().mean(0)
        assert old.norm() > 0
        assert (old - new).norm() <= 1e-6 * old.norm(), name


def _save_in_every_way() -> dict[str, Any]:
    run = _train(Run.new(hook_options=OPTIONS), 3)
    own = residuals(run.hook)
    saved = {how: _save(run, how) for how in ("gathered", "parts")}
    return {"saved": saved, "residuals": own, "then": _train(run, 1).weights()}


def _load_in_every_way(saved: dict[int, list[dict[str, Any]]]) -> dict[tuple[int, str], Any]:
    results = {}
    for before, by_rank in saved.items():
        for how in ("gathered", "parts"):
            run = _load(
                Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 900}), [each[how] for each in by_rank], how
            )
            loaded = residuals(run.hook)
            weights = _train(run, 1).weights()
            results[before, how] = {"residuals": loaded, "weights": weights, "stats": run.hook.stats()}
    return results


@pytest.fixture(scope="module")
def saved_in_every_world(worker_pool: Any) -> dict[int, list[Any]]:
    return {world_size: worker_pool.run(_save_in_every_way, world_size=world_size) for world_size in WORLDS}


@pytest.mark.parametrize("after", WORLDS)
def test_from_any_number_of_ranks(run_ranks: Any, saved_in_every_world: dict[int, list[Any]], after: int) -> None:
    saved = {before: [rank["saved"] for rank in ranks] for before, ranks in saved_in_every_world.items()}
    results = run_ranks(_load_in_every_way, saved, world_size=after)
    for (before, how), first in results[0].items():
        ranks = [result[before, how] for result in results]
        old = [rank["residuals"] for rank in saved_in_every_world[before]]
        _assert_same_mean(old, [rank["residuals"] for rank in ranks])
        if before == after:  # then each rank has its own again, to the bit
            for mine, theirs in zip(old, (rank["residuals"] for rank in ranks), strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for rank in ranks:
            assert torch.equal(rank["weights"], first["weights"])
            assert rank["stats"]["step"] == 4 and rank["stats"]["compressed_steps"] == 1
            for expected in (saved_in_every_world[before][0]["then"], saved_in_every_world[2][0]["then"]):
                assert (rank["weights"] - expected).norm() <= 1e-5 * expected.norm()
