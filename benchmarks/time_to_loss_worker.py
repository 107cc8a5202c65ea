"""A rank of time_to_loss.py, in a process of its own in the namespace of its node.

time_to_loss.py starts it with its place as JSON in the command line, and writes one training per line to its stdin.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import convergence
import language_model
import torch
import torch.distributed as dist
from common import Row
from hooks import CHOOSING, starts_late, wrap
from link_ranks import bytes_sent, run_worker, serve
from torch import nn
from torch.nn import functional

VALIDATION_BATCHES = 32  # of the language model, at each point of a curve
WARM_UP = 10  # steps before those that are timed; in the first two DDP builds its buckets


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and its data.

    Attributes:
        optimizer, schedule: both step once the gradients are ready.
        batches: this rank's parts, without end.
        loss: computes the loss of a batch.
        validation_loss: computes the model's loss on the held-out data.
        clip: norm to which the gradients are clipped.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batches: Iterator[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    validation_loss: Callable[[], float]
    clip: float | None = None

    def step(self) -> None:
        """Update the model from its gradients."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()


def language(seed: int, steps: int, faster: float) -> Training:
    """As in language_model.py: the batch of a step is divided among the ranks."""
    source, held_out = language_model.text()
    model = language_model.ByteTransformer()
    optimizer, schedule = language_model.recipe(model, steps, faster)
    generator, validation = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1234)
    held = language_model.windows(held_out, VALIDATION_BATCHES * language_model.BATCH, validation)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            whole = language_model.windows(source, language_model.BATCH, generator)
            yield whole.chunk(dist.get_world_size())[dist.get_rank()]

    def validation_loss() -> float:
        return statistics.fmean(language_model.loss_of(model, part).item() for part in held.split(language_model.BATCH))

    return Training(model, optimizer, schedule, batches(), language_model.loss_of, validation_loss, clip=1.0)


def digits(seed: int, steps: int, faster: float) -> Training:
    """As in convergence.py: each rank has its own images."""
    images, labels, test_images, test_labels = convergence.digits()
    model = convergence.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * faster, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            mine = torch.randperm(len(labels), generator=order)[dist.get_rank() :: dist.get_world_size()]
            yield from mine[: len(mine) // convergence.PER_RANK * convergence.PER_RANK].split(convergence.PER_RANK)

    def loss(wrapped: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(wrapped(images[batch]), labels[batch])

    def validation_loss() -> float:
        return functional.cross_entropy(model(test_images), test_labels).item()

    return Training(model, optimizer, schedule, batches(), loss, validation_loss)


TASKS = {"language": language, "digits": digits}
"""Functions of seed, steps and the factor of the learning rate."""


def train(task: str, label: str, seed: int, steps: int, points: int, timed: int, interface: str) -> Row:
    """Run one training from its first step on; or, with `timed`, only that many steps, after a warm-up. All ranks must
    call this. Times are from rank 0's clock, which stops during validations."""
    torch.manual_seed(seed)
    label, _, faster = label.partition("@")
    training = TASKS[task](seed, steps, float(faster or 1))
    wrapped, hook = wrap(training.model, label, start=steps // 10 if starts_late(label) else 0)
    seconds, megabytes, curve = 0.0, 0.0, []
    ends = [WARM_UP, WARM_UP + timed] if timed else [steps * (point + 1) // points for point in range(points)]
    for begin, end in itertools.pairwise([0, *ends]):
        dist.barrier()
        before, started = bytes_sent(interface), time.perf_counter()
        for batch in itertools.islice(training.batches, end - begin):
            wrapped.zero_grad(set_to_none=True)
            training.loss(wrapped, batch).backward()
            training.step()
        if hook is not None:
            hook.synchronize()  # what is validated is the model of all ranks
        dist.barrier()
        seconds += time.perf_counter() - started
        megabytes += (bytes_sent(interface) - before) / 1e6
        if dist.get_rank() == 0:
            with torch.no_grad():
                curve.append([end, seconds, megabytes, None if timed else training.validation_loss()])
    chosen = hook.stats()["chosen"] if hook is not None and label in CHOOSING else None
    return {"curve": curve, "chosen": chosen}


def worker(rank: int, world_size: int, ranks_per_node: int, interface: str) -> None:
    serve(rank, {}, functools.partial(train, interface=interface))


if __name__ == "__main__":
    run_worker(worker)
