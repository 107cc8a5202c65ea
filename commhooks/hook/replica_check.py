"""Check that the replicas still have equal weights: the ranks compare checksums of them."""

import torch

from commhooks.comm.collectives import agreement_key, checksum, gather_rows, on_all_shards
from commhooks.errors import HookRunError, listed
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.source import GradientSource
from commhooks.gradients.torch_private import current_task
from commhooks.hook.protocol import Hook


class ReplicaCheck:
    """Compares the replicas before every `every`-th synchronised pass, beginning with the first.

    Compares frozen weights, too, but not parameters that DDP ignores. All ranks of the model must
    run it. Raises HookRunError on all ranks if anything differs; the message names the parameters
    and the ranks.
    """

    def __init__(self, source: GradientSource, hook: Hook, every: int) -> None:
        self._source = source
        self._hook = hook
        self._every = every
        self._passes = 0

    @plain_mode()
    def before_pass(self) -> None:
        if not self._hook.status().replicas_agree:
            return
        self._passes += 1
        if (self._passes - 1) % self._every:
            return
        step: int = self._hook.stats()["step"]
        plan = agreement_key(*(repr(row) for row in self._hook.plan().parameters))
        # Under `Join`, a rank that has run out of data shadows the other ranks' collectives outside
        # of a backward pass. It has the weights of an earlier step, which are not compared.
        takes_part = int(current_task() != -1)
        numbers = [takes_part, step, plan]
        source = self._source
        on_all_shards(
            lambda: self._compare(numbers), [], source.shard_group, source.device, HookRunError
        )

    def after_pass(self) -> None:
        return None

    def _compare(self, numbers: list[int]) -> None:
        """`numbers`: 1 if this rank takes part, its step, and a hash of the plan."""
        group = self._source.group
        counters = self._hook.counters
        step = numbers[1]
        if group.size() == 1:
            return
        parameters = {
            name: weight for name, weight in self._source.weights().items() if weight.numel() > 0
        }
        if not parameters:  # all are empty, or the model is gone
            return
        device = next(iter(parameters.values())).device
        what = f"the comparison of the replicas before step {step}"
        numbers = [*numbers, agreement_key(*parameters)]
        head = torch.tensor(numbers, dtype=torch.int64, device=device)
        heads = gather_rows(head, group, counters, what).tolist()
        present = [rank for rank, row in enumerate(heads) if row[0]]
        subjects = [
            "the step of the hook",
            "the plan of what is compressed",
            "the names of the parameters",
        ]
        _raise_where_different(step, subjects, {rank: heads[rank][1:] for rank in present})
        sums = torch.stack([checksum(p).to(device) for p in parameters.values()])
        rows = gather_rows(sums, group, counters, what).tolist()
        subjects = [f"parameter {name}" for name in parameters]
        _raise_where_different(step, subjects, {rank: rows[rank] for rank in present})


def _raise_where_different(step: int, subjects: list[str], rows: dict[int, list[int]]) -> None:
    if not rows:
        return
    first = min(rows)
    differing = []
    for place, subject in enumerate(subjects):
        others = [rank for rank, row in rows.items() if row[place] != rows[first][place]]
        if others:
            differing.append(f"{subject} (ranks [{listed(others)}] against rank {first})")
    if differing:
        raise HookRunError(
            f"the replicas have drifted apart before step {step}: they differ in"
            f" {listed(differing)}. Something changes the model on some ranks only: weights set or"
            " loaded on one rank, parameters that DDP does not reduce (unfrozen after the wrap),"
            " or another optimizer or learning rate. Go back to the last checkpoint in which they"
            " were equal"
        )
