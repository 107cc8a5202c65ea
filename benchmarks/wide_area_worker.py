"""A rank of wide_area_training.py, in a process of its own in the namespace of its node.

A job on its stdin makes a DDP model with a hook and trains it until the hook has begun, or continues to train that
model.
"""

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from common import Row
from hooks import wrap
from link_ranks import bytes_sent, run_worker, serve
from models import forward_loss, make

TOKENS, START, WARM_UP = 64, 2, 4


class Training:
    """One model with a hook. Every training takes the same steps."""

    def __init__(self, model_name: str, label: str, bucket_cap_mb: float, rank: int) -> None:
        self.model, self._task = make(model_name)
        self._ddp, self._hook = wrap(self.model, label, start=START, bucket_cap_mb=bucket_cap_mb)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(1000 + rank)

    def steps(self, number: int) -> list[float]:
        """Take `number` steps, and return the seconds of each."""
        times, before = [], time.perf_counter()
        for _ in range(number):
            self._optimizer.zero_grad(set_to_none=True)
            forward_loss(self._ddp, self._task, self._task.batch(TOKENS)).backward()
            self._optimizer.step()
            now = time.perf_counter()
            times.append(now - before)
            before = now
        return times

    def facts(self) -> Row:
        stats = {} if self._hook is None else self._hook.stats()
        of_pass = stats.get("collectives_last_pass")
        return {"buckets": stats.get("buckets"), "collectives": of_pass, "chosen": stats.get("chosen")}


def hash_of(model: torch.nn.Module) -> str:
    """Hash all bits of the weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def worker(rank: int, world_size: int, ranks_per_node: int, interface: str, model_name: str) -> None:
    training: Any = None

    def job(steps: int = 0, **new: Any) -> Row:
        nonlocal training
        if new:
            training = Training(model_name, rank=rank, **new)
            training.steps(WARM_UP)
            dist.barrier()
            return {}
        before = bytes_sent(interface)
        slowest = torch.tensor(training.steps(steps), dtype=torch.float64)
        sent = bytes_sent(interface) - before
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        hashes: list[Any] = [None] * world_size
        dist.all_gather_object(hashes, hash_of(training.model))
        return {"times_s": slowest.tolist(), "sent_bytes": sent, "hashes": hashes, **training.facts()}

    serve(rank, {}, job)


if __name__ == "__main__":
    run_worker(worker)
