"""Trainings that are left alone, with whose weights those of the killed ones are compared."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.stress import chaos_training
from tests.stress.chaos_cases import Combination
from tests.stress.chaos_runs import WITHOUT_RESIDUALS, Outcome
from tests.stress.chaos_watch import Watch
from tests.support.accelerators import accelerate_launched


def left_alone(combination: Combination, folder: str, forgets_at: int | None) -> torch.Tensor:
    """The final weights of a training that does not die; run by the ranks of a `WorkerPool`."""
    # As torchrun would have it; the process group is there already.
    with accelerate_launched(TORCHELASTIC_RUN_ID="1", GROUP_RANK="0"):
        return chaos_training.train(
            combination, Path(folder), Watch(Path(folder), dist.get_rank(), forgets_at=forgets_at)
        )[0]


class Twins:
    """Of each combination one training that is left alone, by the ranks of a `WorkerPool`."""

    def __init__(self, run_ranks: Any) -> None:
        self._run_ranks = run_ranks
        self._weights: dict[tuple[Combination, int | None], torch.Tensor] = {}

    def of(self, outcome: Outcome) -> torch.Tensor:
        """The weights that a training must have. Where it has said that it goes on without
        residuals: those of one that lost them at that step.
        """
        combination = outcome.case.combination
        key = combination, outcome.resumed_at if outcome.message == WITHOUT_RESIDUALS else None
        if key not in self._weights:
            with tempfile.TemporaryDirectory(prefix="commhooks-chaos-twin-") as folder:
                first, *others = self._run_ranks(
                    left_alone, combination, folder, key[1], world_size=combination.ranks
                )
            assert all(torch.equal(first, other) for other in others), (
                f"{combination}: the ranks differ"
            )
            self._weights[key] = first
        return self._weights[key]
