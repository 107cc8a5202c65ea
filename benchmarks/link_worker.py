"""A rank of link.py, in a process of its own in the namespace of its node.

link.py starts it with its place as JSON in the command line, and writes one job per line to its stdin.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from common import Row
from hooks import CHOOSING, steps_of_round, wrap
from link_ranks import bytes_sent, run_worker, serve
from models import forward_loss, make

SIZES = {
    "transformer": {"light": 64, "heavy": 512},
    "resnet18": {"light": 8, "heavy": 64},
    "tiny_transformer": {"light": 64, "heavy": 128},
}
START, WARM_UP = 2, 4
DECIDED_WITHIN = 500
"""Maximum number of steps until the decision. Steps of a few milliseconds need more trials than long ones."""


def worker(rank: int, world_size: int, ranks_per_node: int, interface: str, model_name: str, hooks: list[str]) -> None:
    """Make the models, then run the jobs."""
    task = make(model_name)[1]

    def new(label: str) -> Any:
        model, _ = make(model_name)
        wrapped = wrap(model, label, start=START, ranks_per_node=ranks_per_node)
        return wrapped, torch.optim.SGD(model.parameters(), lr=1e-3)

    models = {label: new(label) for label in hooks}

    def step(label: str, batch: Any) -> tuple[float, int]:
        """Return (seconds on the slower rank, bytes sent by this rank) of one step. It is the mean over the steps from
        one communication to the next, between which the ranks do not wait for each other."""
        steps = steps_of_round(label)
        (ddp_model, _), optimizer = models[label]
        dist.barrier()
        before, started = bytes_sent(interface), time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            forward_loss(ddp_model, task, batch).backward()
            optimizer.step()
        passed = torch.tensor([(time.perf_counter() - started) / steps], dtype=torch.float64)
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(passed, dist.ReduceOp.MAX)
        # Read the counter after that message: until then data of the hook may be in the queue of the link.
        return passed.item(), (bytes_sent(interface) - before) // steps

    def job(size: int, steps: int, seconds: float, warms_up: bool = False) -> Row:
        of_hooks = samples(size, steps, seconds, warms_up)
        compressed = {label: hook.stats()["compressed_steps"] for label, ((_, hook), _) in models.items() if hook}
        return {"hooks": of_hooks, "compressed": compressed}

    def samples(size: int, steps: int, seconds: float, warms_up: bool) -> dict[str, Row]:
        torch.manual_seed(rank)
        batch = task.batch(size)
        decided = {
            label: decide(label, batch) for label in hooks if label.partition(":")[0] in CHOOSING and not warms_up
        }
        before = {label: codec_s(label) for label in hooks}
        found: dict[str, list[tuple[float, int]]] = {label: [] for label in hooks}
        for turn in range(steps):
            for label in hooks[turn % len(hooks) :] + hooks[: turn % len(hooks)]:
                # Both ranks have the same times, those of the slower rank, so they make the same decision.
                if not found[label] or sum(passed for passed, _ in found[label]) < seconds:
                    found[label].append(step(label, batch))
        codec = [(codec_s(label) - before[label]) / len(found[label]) / steps_of_round(label) for label in hooks]
        state = [state_bytes(label) for label in hooks]
        everywhere = torch.tensor([codec, state], dtype=torch.float64)
        total, largest = everywhere.clone(), everywhere
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {
            label: {
                "samples": list(zip(*found[label], strict=True)),
                "codec_s": total[0, place].item() / world_size,
                "state_bytes": largest[1, place].item(),
                **decided.get(label, {}),
            }
            for place, label in enumerate(hooks)
        }

    def decide(label: str, batch: Any) -> Row:
        """Let the hook begin anew and decide; equal on all ranks."""
        models[label] = new(label)
        hook, spent_s, steps = models[label][0][1], 0.0, 0
        while steps < DECIDED_WITHIN and (notes := hook.state_dict("drop")["notes"])["phase"] != "decided":
            spent_s += step(label, batch)[0]
            steps += 1
        return {
            "chosen": hook.stats()["chosen"],
            "decided_after": notes["since"],
            "deciding_s": spent_s,
            "why": notes["why"],
        }

    def codec_s(label: str) -> float:
        hook = models[label][0][1]
        return 0.0 if hook is None else hook.stats()["codec_s"] or 0.0

    def state_bytes(label: str) -> int:
        hook = models[label][0][1]
        return 0 if hook is None or ":fsdp2" in label else size_of(hook.state_dict("per_rank"))

    serve(rank, job(SIZES[model_name]["light"], WARM_UP, float("inf"), warms_up=True), job)


def size_of(saved: dict[str, Any]) -> int:
    """Return the bytes of the residuals and factors in a payload."""
    kept = [each for entry in saved.get("parameters", {}).values() for each in (entry["q"], *(entry["residual"] or []))]
    return sum(each.nbytes for each in kept if each is not None)


if __name__ == "__main__":
    run_worker(worker)
