"""A small training run on one rank, shared by the tests of saving and resuming."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.inside import session_of

SEVERAL_BUCKETS_MB = 0.001
ONE_BUCKET_MB = 25


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 12, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(12 * 36, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 10),
    ).to(dtype)


def batch(
    step: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step and rank, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 10, (8,), generator=generator)


@dataclass
class Run:
    """A model, its optimizer and its hook on this rank."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    hook: commhooks.CommHook
    step: int = 0
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False)
    )
    gradients: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def new(
        cls,
        model: torch.nn.Module | None = None,
        *,
        bucket_cap_mb: float = SEVERAL_BUCKETS_MB,
        hook: Any = "powerSGD",
        ddp: dict[str, Any] | None = None,
        **attach: Any,
    ) -> "Run":
        wrapped = DistributedDataParallel(
            model or make_model(), bucket_cap_mb=bucket_cap_mb, **(ddp or {})
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        return cls(wrapped, optimizer, commhooks.attach(wrapped, hook, **attach))

    def train(self, steps: int) -> "Run":
        for _ in range(steps):
            first = next(self.ddp.parameters())
            images, labels = (
                tensor.to(first.device) for tensor in batch(self.step, dist.get_rank(), first.dtype)
            )
            self.optimizer.zero_grad()
            self.scaler.scale(
                torch.nn.functional.cross_entropy(self.ddp(images), labels)
            ).backward()
            self.gradients.append(flat(p.grad for p in self.ddp.parameters() if p.grad is not None))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
        return self

    def weights(self) -> torch.Tensor:
        return flat(self.ddp.parameters())

    def save(self, **how: Any) -> dict[str, Any]:
        """Return all that a checkpoint contains, converted to bytes and back as for a file."""
        import io

        content = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hook": self.hook.state_dict(**how),
            "step": self.step,
        }
        file = io.BytesIO()
        torch.save(content, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def load(self, saved: dict[str, Any], strict: bool | None = None) -> "Run":
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.hook.load_state_dict(saved["hook"], strict=strict)
        self.step = saved["step"]
        return self


def flat(tensors: Any) -> torch.Tensor:
    """Concatenate the values of all tensors. All ranks must call this for tensors that are
    sharded.
    """
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole]).clone()


def residuals(hook: commhooks.CommHook) -> dict[str, torch.Tensor]:
    """Return this rank's residuals by parameter name, flat."""
    assert session_of(hook) is not None
    return {name: residual.clone() for name, residual in session_of(hook).state["residual"].items()}


def plain(value: Any) -> Any:
    """Convert a part of a payload to objects that `==` compares and training leaves alone."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value
