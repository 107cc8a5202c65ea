"""Trainings for `compare_versions.py`: a small model, a situation of DDP, and what is noted of a
run.

Only names of `commhooks` itself are used, so that the same file runs against any version.
Everything is made of seeds: two runs of one version give the same bits.
"""

import contextlib
import dataclasses
import hashlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commhooks

STEPS = 8
SMALL_MB = 0.004
WORDS, WIDTH = 20, 24


class Net(nn.Module):
    """Convolutions (one of them channels last), a parameter that lies transposed, linear layers of
    which one may go unused, one that is too thin to compress, an embedding, vectors and a scalar.

    Args:
        kind: "sparse" or "tied" embedding; "odd": with complex, 16-bit and empty parameters;
            "norm": with a BatchNorm, and a parameter in float64.
    """

    def __init__(self, kind: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 6, 3)
        self.last = nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter((torch.randn(WIDTH, 32) / 6).t())
        self.words = nn.Embedding(WORDS, WIDTH, sparse=kind == "sparse")
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.thin = nn.Linear(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WORDS)
        if kind == "tied":
            self.out.weight = self.words.weight
        if kind == "odd":
            self.waves = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 5)
            self.narrow = nn.Parameter((torch.randn(WIDTH, 32) / 5).bfloat16())
            self.empty = nn.Parameter(torch.empty(0, WIDTH))
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)
            self.wide = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 5)
        self.kind = kind
        self.overflow: float | None = None
        self.turned.register_hook(
            lambda grad: grad if self.overflow is None else grad + self.overflow
        )

    def forward(
        self, images: torch.Tensor, words: torch.Tensor, use_branch: bool = True
    ) -> torch.Tensor:
        y = torch.tanh(self.last(torch.tanh(self.conv(images)))).flatten(1)
        y = torch.tanh(y @ self.turned) * self.scale + self.words(words)
        z = torch.tanh(self.trunk(y))
        if use_branch:
            z = z + torch.tanh(self.branch(y))
        z = z + self.thin(y).sum(1, keepdim=True) / 10
        if self.kind == "odd":
            z = z + (y.to(self.waves.dtype) @ self.waves).abs() / 10 + self.empty.sum()
            z = z + (y.bfloat16() @ self.narrow).float().mean(1, keepdim=True)
        if self.kind == "norm":
            z = self.norm(z) + torch.tanh(y.double() @ self.wide).to(z.dtype)
        return self.out(z)


def batch(
    step: int, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, words, labels: the same for a given step and rank, in whatever process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    words, labels = torch.randint(0, WORDS, (2, 4), generator=generator)
    return images, words, labels


@dataclasses.dataclass(frozen=True)
class Situation:
    """How a run goes. `several`: many small buckets. `ddp`, `attach`: arguments. `micro`: backward
    passes per step, of which DDP sees the last. `unused`: who leaves the branch out. `scaler`: with
    a loss scale, and steps that are not finite; `spoilt`: such steps without a loss scale. `quiet`:
    without logging, so that rank 0 speaks on stderr. `resume`: how the state is saved in the
    middle; `savers`: how many ranks train until then, if not all. `local`: the ranks have weights
    of their own, which are noted after each step; "delayed": a thread sends, so counters of single
    passes differ from run to run.
    """

    several: bool = True
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    attach: dict[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = ""
    dtype: torch.dtype = torch.float32
    micro: int = 1
    unused: str = ""
    scaler: bool = False
    join: bool = False
    quiet: bool = False
    resume: str = ""
    savers: int = 0
    local: str = ""
    spoilt: bool = False


class Run:
    """A model with its optimizer and hook on this rank.

    Args:
        hook: arguments of `attach`; or (state, function) for `register_comm_hook`.
        group: of DDP.
    """

    def __init__(self, hook: Any, situation: Situation, seed: int = 0, group: Any = None) -> None:
        self.situation = situation
        self.module = Net(situation.kind, seed)
        if situation.dtype != torch.float32:
            self.module.to(situation.dtype)
        cap = SMALL_MB if situation.several else 25
        self.ddp = DistributedDataParallel(
            self.module, bucket_cap_mb=cap, process_group=group, **situation.ddp
        )
        momentum = 0.0 if situation.kind == "sparse" else 0.9
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=momentum)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            if situation.scaler
            else None
        )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.step = 0
        self.found: dict[str, Any] = {
            "losses": [],
            "gradient digests": [],
            "scales": [],
            "by step": [],
        }
        self.hook: Any = None
        self.state: Any = None
        if isinstance(hook, tuple):
            self.state, function = hook
            self.ddp.register_comm_hook(self.state, function)
            return
        scale = {} if self.scaler is None else {"loss_scale": self.scaler.get_scale}
        self.state = hook.get("hook_state")
        self.hook = commhooks.attach(self.ddp, **(hook | situation.attach | scale))

    def train(self, upto: int) -> "Run":
        if self.situation.join:
            with Join([self.ddp]):
                self._steps(upto // 2 + 2 * self.rank)
        else:
            self._steps(upto)
        return self

    def _steps(self, upto: int) -> None:
        while self.step < upto:
            self.optimizer.zero_grad()
            for micro in range(self.situation.micro):
                last = micro == self.situation.micro - 1
                with contextlib.nullcontext() if last else self.ddp.no_sync():
                    self._backward(micro)
            gradients = [p.grad.to_dense() for p in self.module.parameters() if p.grad is not None]
            self.found["gradient digests"].append(digest(gradients))
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.found["scales"].append(self.scaler.get_scale())
            else:
                self.optimizer.step()
            self.step += 1
            if self.situation.local:
                self.found.setdefault("weight digests", []).append(digest(self.module.parameters()))
            if self.hook is not None and self.situation.local != "delayed":
                stats = self.hook.stats()
                self.found["by step"].append([stats.get(key) for key in _BY_STEP])

    def _backward(self, micro: int) -> None:
        images, words, labels = batch(10 * self.step + micro, self.rank, self.situation.dtype)
        loss = functional.cross_entropy(self.ddp(images, words, self._use_branch()), labels)
        self.found["losses"].append(float(loss.detach()))
        bad = {1: (0, "inf"), 4: (self.world_size - 1, "-inf"), 5: (0, "nan")}.get(self.step)
        may = self.scaler is not None or self.situation.spoilt
        spoilt = may and bad is not None and bad[0] == self.rank
        self.module.overflow = float(bad[1]) if spoilt and bad is not None else None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _use_branch(self) -> bool:
        if self.situation.unused == "by rank":
            return (True, True, False, self.rank == 0)[self.step % 4]  # by all, all, none, one
        return self.situation.unused != "by all" or self.step in (0, 1, 4, 6)

    def save(self, residual: str, **how: Any) -> dict[str, Any]:
        """As a checkpoint file gives it back."""
        parts = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        parts["hook"] = self.hook.state_dict(residual, **how) if self.hook is not None else None
        return through_bytes(parts)

    def load(self, saved: dict[str, Any]) -> "Run":
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["hook"] is not None:
            self.hook.load_state_dict(saved["hook"])
        self.step = saved["step"]
        return self

    def result(self) -> dict[str, Any]:
        if self.situation.local == "delayed":
            self.hook.synchronize()
        found, hook = dict(self.found), self.hook
        found["weights"] = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        if hook is not None:
            found["plan"] = hook.plan().as_dict()
            # Tables take a while.
            found["plan as text"] = (
                hook.plan().summary() if self.situation.several else str(hook.plan())
            )
            varying = (
                "codec_s",
                "waiting_s",
                *(_OF_ONE_PASS if self.situation.local == "delayed" else ()),
            )
            found["stats"] = {k: v for k, v in hook.stats().items() if not k.startswith(varying)}
            found["repr"], found["options"], found["name"] = repr(hook), hook.options, hook.name
            found["norms"] = hook.norms()
            for residual in ("per_rank", "drop", "mean"):
                found[f"payload {residual}"] = hook.state_dict(residual)
        if isinstance(self.state, commhooks.PowerSGDState):
            found["state"] = of_state(self.state)
        return found


def of_state(state: Any) -> dict[str, Any]:
    """What torch's state has as attributes, and its statistics."""
    found = {name: getattr(state, name) for name in dir(state) if not name.startswith("_")}
    numbers = {name: each for name, each in found.items() if isinstance(each, (bool, int, float))}
    return numbers | {"stats": state.compression_stats()}


_OF_ONE_PASS = ("collectives_last_pass", "bytes_sent_last_pass", "last_issued")
_BY_STEP = (
    "step",
    "compressed_steps",
    "nonfinite_steps",
    "collectives_last_pass",
    "bytes_sent_last_pass",
    "last_issued",
    "handshakes",
)


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def through_bytes(content: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
