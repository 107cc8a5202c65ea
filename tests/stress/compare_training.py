"""Trainings for `compare_versions.py`: a small model, every hook, and the ways to run DDP.

Only names of `commhooks` itself are used, so that the same file runs against any version. Everything is made of seeds:
two runs of one version give the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

STEPS, START = 11, 3
SMALL_MB = 0.004
WORDS, WIDTH = 20, 24


# ------------------------------------------------------------------------------------------------------------ the model


class Net(nn.Module):
    """Convolutions (one of them channels last), a parameter that lies transposed, linear layers of which one may go
    unused, one that is too thin to compress, an embedding, vectors and a scalar.

    Args:
        kind: "sparse" or "tied" embedding, or "kinds": with complex, 16-bit and empty parameters.
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
        if kind == "kinds":
            self.waves = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 5)
            self.narrow = nn.Parameter((torch.randn(WIDTH, 32) / 5).bfloat16())
            self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.kind = kind
        self.overflow: float | None = None
        self.turned.register_hook(lambda grad: grad if self.overflow is None else grad + self.overflow)

    def forward(self, images: torch.Tensor, words: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        y = torch.tanh(self.last(torch.tanh(self.conv(images)))).flatten(1)
        y = torch.tanh(y @ self.turned) * self.scale + self.words(words)
        z = torch.tanh(self.trunk(y))
        if use_branch:
            z = z + torch.tanh(self.branch(y))
        z = z + self.thin(y).sum(1, keepdim=True) / 10
        if self.kind == "kinds":
            z = z + (y.to(self.waves.dtype) @ self.waves).abs() / 10 + self.empty.sum()
            z = z + (y.bfloat16() @ self.narrow).float().mean(1, keepdim=True)
        return self.out(z)


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, words, labels: the same for a given step and rank, in whatever process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    words, labels = torch.randint(0, WORDS, (2, 4), generator=generator)
    return images, words, labels


# ------------------------------------------------------------------------------------------------------------ the hooks


class Momentum:
    """The state of a user's own hook."""

    def __init__(self) -> None:
        self.means: dict[str, torch.Tensor] = {}
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(sorted(self.means.items())), "calls": self.calls}  # they come as the network brings them

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.means, self.calls = dict(saved["means"]), saved["calls"]


def momentum_hook(state: Momentum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    key = f"{bucket.index()} of {bucket.buffer().numel()} {bucket.buffer().dtype}"
    sparse = bucket.buffer().is_sparse
    state.calls += 1

    def smooth(future: Any) -> torch.Tensor:
        mean = future.value()[0] / dist.get_world_size()
        if sparse:
            return mean
        state.means[key] = mean + 0.5 * state.means.get(key, torch.zeros_like(mean))
        return state.means[key].clone()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(smooth)


def without_state_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return commhooks.allreduce_hook(None, bucket)


def _power(rank: int = 2, batched: bool = False, **options: Any) -> commhooks.PowerSGD:
    config = commhooks.BatchedPowerSGD if batched else commhooks.PowerSGD
    return config(matrix_approximation_rank=rank, start_powerSGD_iter=START, **({"fused": False} | options))


def _state(rank: int = 2, start: int = START, **options: Any) -> commhooks.PowerSGDState:
    options = {"fused": False} | options  # the kernel that the name says: versions choose another one by themselves
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start, **options)


# Given to `attach`.
ATTACHED: dict[str, Callable[[], Any]] = {
    "allreduce": commhooks.AllReduce,
    "fp16": commhooks.FP16Compress,
    "bf16": commhooks.BF16Compress,
    "noop": commhooks.Noop,
    "powerSGD 1": lambda: _power(1),
    "powerSGD 2": _power,
    "powerSGD 4": lambda: _power(4),
    "batched": lambda: _power(batched=True),
    "alternate": lambda: _power(alternate=True),
    "fused": lambda: _power(fused=True),
    "alternate fused": lambda: _power(alternate=True, fused=True),
    "batched fused": lambda: _power(batched=True, fused=True),
    "own": lambda: (momentum_hook, Momentum()),
    "own without state": lambda: (without_state_hook, None),
    "state": lambda: (powerSGD_hook.powerSGD_hook, _state()),
}
_fp16, _bf16 = default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper
LOW, BATCHED = powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook
# Given to `register_comm_hook`.
BARE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bare allreduce": lambda: (None, default_hooks.allreduce_hook),
    "bare fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bare bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "bare noop": lambda: (None, debugging_hooks.noop_hook),
    "bare powerSGD": lambda: (_state(), LOW),
    "bare batched": lambda: (_state(), BATCHED),
    "bare alternate": lambda: (_state(alternate=True), LOW),
    "bare fused": lambda: (_state(fused=True), LOW),
    "bare fp16(allreduce)": lambda: (None, _fp16(default_hooks.allreduce_hook)),
    "bare bf16(allreduce)": lambda: (None, _bf16(default_hooks.allreduce_hook)),
    "bare fp16(powerSGD)": lambda: (_state(), _fp16(LOW)),
    "bare bf16(powerSGD)": lambda: (_state(), _bf16(LOW)),
    "bare fp16(batched)": lambda: (_state(), _fp16(BATCHED)),
    "bare bf16(batched)": lambda: (_state(), _bf16(BATCHED)),
    "bare bf16(fp16(alternate))": lambda: (_state(alternate=True), _bf16(_fp16(LOW))),
}

# ------------------------------------------------------------------------------------------------------- the situations


@dataclasses.dataclass(frozen=True)
class Situation:
    """How a run goes. `several`: many small buckets. `ddp`, `attach`: arguments. `micro`: backward passes per step, of
    which DDP sees the last. `unused`: who leaves the branch out. `quiet`: without logging, so that rank 0 speaks on
    stderr. `resume`: how the state is saved in the middle."""

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

    def and_also(self, **changes: Any) -> Situation:
        return dataclasses.replace(self, **changes)


FIND = {"find_unused_parameters": True}
ANY = {  # of every hook
    "one bucket": Situation(several=False),
    "buckets": Situation(quiet=True),
    "no_sync": Situation(micro=3),
    "unused": Situation(ddp=FIND, unused="by rank"),
    "unused by all": Situation(ddp=FIND | {"skip_all_reduce_unused_params": True}, unused="by all"),
    "static graph": Situation(ddp={"static_graph": True}),
    "bucket views": Situation(ddp={"gradient_as_bucket_view": True}),
    "join": Situation(join=True),
    "scaler": Situation(scaler=True),
    "float64": Situation(dtype=torch.float64),
    "bfloat16": Situation(dtype=torch.bfloat16),
    "sparse": Situation(kind="sparse"),
    "kinds": Situation(kind="kinds"),
    "tied": Situation(kind="tied"),
}
OF_ATTACHED = {
    "wrapper fp16": Situation(attach={"wrapper": "fp16"}),
    "wrapper bf16": Situation(attach={"wrapper": "bf16"}),
    "mean": Situation(resume="mean"),
    "per_rank": Situation(resume="per_rank"),
    "drop": Situation(resume="drop"),
}


# ---------------------------------------------------------------------------------------------------------------- a run


class Run:
    """A model with its optimizer and hook on this rank.

    Args:
        options: changes of the config.
        state: a pickled state of a bare hook that is used in place of a new one.
        group: of DDP.
    """

    def __init__(
        self,
        hook: str,
        situation: Situation,
        options: dict[str, Any] | None = None,
        seed: int = 0,
        state: Any = None,
        group: Any = None,
    ) -> None:
        self.situation = situation
        self.module = Net(situation.kind, seed)
        if situation.dtype != torch.float32:
            self.module.to(situation.dtype)
        cap = SMALL_MB if situation.several else 25
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=cap, process_group=group, **situation.ddp)
        momentum = 0.0 if situation.kind == "sparse" else 0.9
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=momentum)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if situation.scaler else None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.step = 0
        self.found: dict[str, Any] = {"losses": [], "gradient digests": [], "scales": [], "by step": []}
        self.hook: Any = None
        self.state: Any = None
        if hook in BARE:
            self.state, function = BARE[hook]()
            self.state = state if state is not None else self.state
            self.ddp.register_comm_hook(self.state, function)
            return
        given, extra = ATTACHED[hook](), dict(situation.attach)
        if isinstance(given, tuple):
            given, self.state = given
            self.state = state if state is not None else self.state
            extra["hook_state"] = self.state
        elif options:
            given = dataclasses.replace(given, **options)
        if self.scaler is not None:
            extra["loss_scale"] = self.scaler.get_scale
        self.hook = commhooks.attach(self.ddp, given, **extra)
        self.found["first plan"] = [self.hook.plan().summary(), self.hook.plan().as_dict()]

    def train(self, upto: int) -> Run:
        if self.situation.join:
            with Join([self.ddp]):
                self._steps(upto // 2 + 3 * self.rank)
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
            if self.hook is not None:
                stats = self.hook.stats()
                self.found["by step"].append([stats[key] for key in _BY_STEP])

    def _backward(self, micro: int) -> None:
        images, words, labels = batch(10 * self.step + micro, self.rank, self.situation.dtype)
        loss = functional.cross_entropy(self.ddp(images, words, self._use_branch()), labels)
        self.found["losses"].append(float(loss.detach()))
        bad = {1: (0, "inf"), 5: (self.world_size - 1, "-inf"), 6: (0, "nan")}.get(self.step)
        poisoned = self.scaler is not None and bad is not None and bad[0] == self.rank
        self.module.overflow = float(bad[1]) if poisoned and bad is not None else None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _use_branch(self) -> bool:
        if self.situation.unused == "by rank":
            return (True, True, False, self.rank == 0)[self.step % 4]  # by all, all, none, one
        return self.situation.unused != "by all" or self.step in (0, 1, 4, 7, 10)

    def save(self, residual: str) -> dict[str, Any]:
        """As a checkpoint file gives it back."""
        parts = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        parts["hook"] = self.hook.state_dict(residual) if self.hook is not None else None
        parts["scaler"] = self.scaler.state_dict() if self.scaler is not None else None
        return through_bytes(parts)

    def load(self, saved: dict[str, Any]) -> Run:
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        if saved["hook"] is not None:
            self.hook.load_state_dict(saved["hook"])
        self.step = saved["step"]
        return self

    def result(self) -> dict[str, Any]:
        found = dict(self.found)
        found["weights"] = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        found["gradients"] = {
            name: [p.grad.layout == torch.strided, p.grad.to_dense().clone()] if p.grad is not None else None
            for name, p in self.module.named_parameters()
        }
        hook, state = self.hook, self.state
        if hook is not None:
            found["plan"] = hook.plan().as_dict()
            found["plan as text"] = str(hook.plan()) if self.rank == 0 else hook.plan().summary()  # tables take a while
            found["stats"] = {k: v for k, v in hook.stats().items() if not k.startswith(("codec_s", "waiting_s"))}
            found["repr"], found["options"], found["name"] = repr(hook), hook.options, hook.name
            found["norms"], found["layers"] = hook.norms(), hook.layers()
            for residual in ("per_rank", "drop", "mean"):
                found[f"payload {residual}"] = hook.state_dict(residual)
        if isinstance(state, commhooks.PowerSGDState):
            found["state"] = {key: getattr(state, key) for key in OF_STATE} | {"stats": state.compression_stats()}
        return found


_BY_STEP = ("step", "compressed_steps", "nonfinite_steps", "collectives_last_pass", "bytes_sent_last_pass",
            "last_issued", "handshakes", "cosine", "cosine_pass")  # fmt: skip
OF_STATE = ("iter", "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback",
             "warm_start", "orthogonalization_epsilon", "random_seed", "compression_stats_logging_frequency",
             "batch_tensors_with_same_shape")  # fmt: skip


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def through_bytes(content: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
