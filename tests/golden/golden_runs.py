"""The runs behind tests/golden/payloads.pt: payloads of every form, and the steps after their load.

Nothing here depends on torch's random numbers: gradients are sines, and Q is in the payload. All
functions run on two ranks.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.checkpoint import parts as payload_parts
from tests.support.inside import learns, session_of, user_state
from tests.support.models import EVERY_PARAMETER, Prescribed, backward
from tests.support.repository import TESTS

FILE = TESTS / "golden" / "payloads.pt"
"""A dict: "saved" holds the payloads of each rank by kind, "gradients" those of the next steps."""
SHAPES = {"conv": (6, 2, 3, 3), "bias": (6,), "wide": (8, 10)}
LOW_RANK = {"matrix_approximation_rank": 2, "min_compression_rate": 1}
SAVED_AT = 4

# One kind per form of a payload: its hook, and how it is saved.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("powerSGD", {"residual": "mean"}),
    "gathered": ("powerSGD", {"residual": "per_rank", "gather": True}),
    "parts": ("powerSGD", {"residual": "per_rank"}),
    "batched": ("batched_powerSGD", {"residual": "per_rank", "gather": True}),
    "users": ("users", {}),
}


class Momentum:
    """The state of a user's hook, with every type that a state may hold."""

    def __init__(self) -> None:
        self.momentum: dict[str, torch.Tensor] = {}
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "calls": self.calls,
            "decay": 0.5,
            "name": "momentum",
            "on": True,
            "nothing": None,
            "list": [1, torch.ones(2, dtype=torch.int64)],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.momentum = saved["momentum"]
        self.calls = saved["calls"]


def momentum_hook(state: Momentum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    def add(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        mean = future.value()
        key = str(bucket.index())
        state.momentum[key] = mean + 0.5 * state.momentum.get(key, torch.zeros_like(mean))
        state.calls += 1
        return state.momentum[key].clone()

    return commhooks.allreduce_hook(None, bucket).then(add)


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Make gradients: sines of one frequency on all ranks, plus sines of another on each."""
    made = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        common = torch.sin((1.7 + 0.31 * place) * numbers + 1.3 * step)
        of_rank = torch.sin((0.9 + 0.17 * rank) * numbers - 0.7 * step + place)
        made[name] = (common + 0.5 * of_rank).to(torch.float32).view(shape)
    return made


def new(hook: str, start: int) -> tuple[DistributedDataParallel, commhooks.CommHook]:
    """Attach the hook. DDP never rebuilds the buckets: one per parameter, or one for `batched`."""
    cap = 25 if hook == "batched_powerSGD" else EVERY_PARAMETER
    ddp = DistributedDataParallel(
        Prescribed(SHAPES), bucket_cap_mb=cap, find_unused_parameters=True
    )
    if hook == "users":
        return ddp, commhooks.attach(ddp, momentum_hook, hook_state=Momentum())
    options = LOW_RANK | {"start_powerSGD_iter": start} if hook.endswith("powerSGD") else None
    return ddp, commhooks.attach(ddp, hook, hook_options=options)


def save(kind: str) -> Any:
    """Return what this rank saves after `SAVED_AT` steps, three of them compressed.

    For "parts" this is a list of the shared part and the part of this rank.
    """
    hook, how = KINDS[kind]
    ddp, attached = new(hook, start=1)
    for step in range(SAVED_AT):
        backward(ddp, gradients(dist.get_rank(), step))
    saved = attached.state_dict(**how)
    return list(payload_parts.split(saved, dist.get_rank())) if kind == "parts" else saved


def save_all() -> dict[str, Any]:
    return {kind: save(kind) for kind in KINDS}


def payload_of(kind: str, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what this rank loads, of what the ranks saved."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    content: Any = saved[rank][kind]
    if kind != "parts":
        return content
    shared = payload_parts.check_shared(content[0])
    needed = payload_parts.ranks_needed(shared, rank, world_size)
    parts = [saved[writer][kind][1] for writer in needed]
    for part, writer in zip(parts, needed, strict=True):
        assert payload_parts.problem_of_part(shared, part, writer) is None
    return payload_parts.merge(shared, parts, rank, world_size)


def resume(kind: str, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Load into a hook that was told to start later. Return its state and two steps' gradients."""
    ddp, attached = new(KINDS[kind][0], start=900)
    attached.load_state_dict(payload_of(kind, saved))
    loaded: dict[str, Any] = {
        "step": attached.stats()["step"],
        "start": attached.options.get("start_powerSGD_iter"),
    }
    if learns(attached):
        state = session_of(attached).state
        loaded["q"] = copy.deepcopy(state["q"])
        loaded["residuals"] = copy.deepcopy(state["residual"])
    else:
        loaded["users"] = copy.deepcopy(user_state(attached).state_dict())
    steps = range(SAVED_AT, SAVED_AT + 2)
    loaded["gradients"] = [backward(ddp, gradients(dist.get_rank(), step)) for step in steps]
    return loaded


def resume_all(saved: list[dict[str, Any]]) -> dict[str, Any]:
    return {kind: resume(kind, saved) for kind in KINDS}
