"""Many trainings in one process per rank, under allocators that check: is memory written to that nobody owns?

    python -m tests.stress.heap [--minutes 10] [--subject hooks] [--allocator quarantine] [--torch-kernels] [--seed 0]

Every training has a process group, a model and a hook of its own. Some end in an exception with collectives in flight.
`--subject torch` trains without hooks, `--subject gloo` only sends messages: what these show is torch's own. A rank
that dies is shown with its stacks and the number of the training; `--first N` begins there. Run by `make heap` (Linux).
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import faulthandler
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.repository import PYTHONPATH
from tests.support.sharded import mesh_of
from tests.support.worker_side import forget_meshes

RANKS = 4
_HELD: list[Any] = []
"""Work of messages that nobody waits for."""
LIMIT_S = 60
ALLOCATORS = {
    "plain": {},
    "perturb": {"MALLOC_PERTURB_": "165"},
    "check": {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"},
    "quarantine": {},  # LD_PRELOAD names the library that is built
}
HOOKS: list[tuple[str, dict[str, Any]]] = [
    ("int8_compress", {"start_iter": 0, "block_size": 32}),
    ("int8_compress", {"start_iter": 1}),
    ("int4_compress", {"start_iter": 0, "block_size": 32}),
    ("int4_compress", {"start_iter": 0, "use_error_feedback": False}),
    ("powerSGD", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2}),
    ("powerSGD", {"start_powerSGD_iter": 1, "matrix_approximation_rank": 5}),
    ("batched_powerSGD", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2}),
    ("bf16_compress", {}),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, the same on all ranks.

    Attributes:
        front: "ddp", "fsdp2", "diloco", or "mean": `quantized_all_reduce`.
        replicas, shards: their product is the number of ranks that take part; shards of FSDP2.
        widths: of the linear layers.
        breaks: the step whose backward pass raises an exception, on all ranks or only on rank 1; -1: none.
        resumes: the state is saved, and goes on in a second training.
    """

    front: str
    replicas: int
    shards: int
    hook: str
    options: dict[str, Any]
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    widths: list[int]
    bucket_cap_mb: float
    nodes: int | None
    steps: int
    breaks: int
    alone: bool
    resumes: bool
    threads: int

    @classmethod
    def draw(cls, seed: int, number: int) -> "Case":
        draw = random.Random(f"{seed} {number}")
        front = draw.choices(["ddp", "fsdp2", "diloco", "mean"], [5, 4, 2, 1])[0]
        ranks = draw.choice([2, 3, 4, 4])
        shards = draw.choice([each for each in (1, 2, 4) if ranks % each == 0]) if front == "fsdp2" else 1
        hook, options = draw.choice(HOOKS)
        if front == "fsdp2" and hook == "batched_powerSGD":
            hook, options = HOOKS[0]
        large = draw.random() < 0.1
        steps = draw.randint(2, 6)
        return cls(
            front,
            ranks // shards,
            shards,
            hook,
            options,
            draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
            draw.choice([None, torch.float32, torch.float64]),
            [draw.randint(150, 400) if large else draw.randint(1, 70) for _ in range(draw.randint(2, 6))],
            draw.choice([1e-6, 0.002, 0.02, 25]),
            2 if front == "ddp" and ranks == 4 and hook != "batched_powerSGD" and draw.random() < 0.3 else None,
            steps,
            draw.randrange(steps) if draw.random() < 0.15 else -1,
            draw.random() < 0.1 and front != "fsdp2",  # torch 2.13 without a hook stopped there in FSDP's all-gather
            draw.random() < 0.4,
            2 if large else 1,
        )


class Broken(RuntimeError):
    """Raised on purpose in a backward pass."""


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise Broken("on purpose")


class Model(torch.nn.Module):
    def __init__(self, widths: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, m) for n, m in pairs).to(dtype)
        self.breaks_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if place == self.breaks_at:
                x = _Break.apply(x)
            x = torch.tanh(layer(x))
        return x


class Training:
    """A model, its optimizer and its hook on this rank."""

    def __init__(self, case: Case, *, hooks: bool, shards: int) -> None:
        self.case, self.hook = case, None
        self.module = Model(case.widths, case.dtype)
        attach: dict[str, Any] = {}
        if case.front == "fsdp2":
            mesh = mesh_of(case.replicas * case.shards // shards, shards)
            policy = MixedPrecisionPolicy(reduce_dtype=case.reduce_dtype)
            for module in (*self.module.layers, self.module):
                fully_shard(module, mesh=mesh["shard"] if hooks else mesh, mp_policy=policy)
            self.model = self.module
            attach = {"replicate_group": mesh["replicate"], "save_residual": "distributed"}
        else:
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=case.bucket_cap_mb)
            attach = {"ranks_per_node": case.nodes} if case.nodes else {}
        if hooks and case.front == "diloco":
            self.hook = commhooks.attach(self.model, commhooks.DiLoCo(sync_every=2, start_iter=0))
        elif hooks:
            self.hook = commhooks.attach(self.model, case.hook, hook_options=case.options or None, **attach)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        breaks = number == self.case.breaks and not (self.case.alone and dist.get_rank() != 1)
        self.module.breaks_at = len(self.module.layers) // 2 if breaks else -1
        self.optimizer.zero_grad()
        x = torch.randn(4, self.case.widths[0], dtype=self.case.dtype)
        self.model(x).square().mean().backward()
        self.optimizer.step()


def train(case: Case, folder: Path, *, hooks: bool) -> None:
    """One training, and a second one that goes on from what it saved."""
    if case.front == "mean":
        return average(case, hooks=hooks)
    first = Training(case, hooks=hooks, shards=case.shards)
    for number in range(case.steps):
        first.step(number)
    if not case.resumes:
        if first.hook is not None and case.steps % 2:
            first.hook.close()
        return None
    ranks = case.replicas * case.shards
    shards = (
        case.shards if case.front != "fsdp2" else {4: {1: 2, 2: 1, 4: 2}}.get(ranks, {}).get(case.shards, case.shards)
    )
    if case.front == "fsdp2":
        if first.hook is not None:
            dcp.save({"hook": first.hook}, checkpoint_id=folder)
        saved = None
    else:
        saved = copy.deepcopy(first.hook.state_dict()) if first.hook is not None else None
    second = Training(case, hooks=hooks, shards=shards)
    if second.hook is not None and case.front == "fsdp2":
        dcp.load({"hook": second.hook}, checkpoint_id=folder)
    elif second.hook is not None:
        second.hook.load_state_dict(saved)
    for number in range(case.steps):
        second.step(number + case.steps)
    return None


def average(case: Case, *, hooks: bool) -> None:
    for width in case.widths:
        tensor = torch.randn(width, 7, dtype=case.dtype)
        if hooks:
            commhooks.quantized_all_reduce(tensor, bits=8 if width % 2 else 4)
        else:
            dist.all_reduce(tensor)


def send_messages(case: Case) -> None:
    """What hooks send, without them: messages of many sizes in both directions, small and large collectives. Some are
    never waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(case.steps):
        works, held = [], []
        for width in case.widths:
            rows = torch.randint(256, (size, width * (1 + number)), dtype=torch.uint8)
            arriving, reduced = torch.empty_like(rows), torch.randn(width, 3)
            others = [(rank + distance) % size for distance in range(1, size)]
            works += [dist.irecv(arriving[other], other, tag=2**30) for other in others]
            works += [dist.isend(rows[other], other, tag=2**30) for other in others]
            works.append(dist.all_reduce(reduced, async_op=True))
            gathered = [torch.empty(5, dtype=torch.int64) for _ in range(size)]
            works.append(dist.all_gather(gathered, torch.arange(5), async_op=True))
            if width % 3:
                held += [rows, arriving, reduced, gathered]
        _HELD.extend(works)  # gloo stops in the middle of a message whose work is gone
        if number == case.breaks:
            raise Broken("on purpose")
        for work in works:
            work.wait()


def rank_main(options: argparse.Namespace, rank: int, port: int, folder: Path) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    control = dist.TCPStore("127.0.0.1", port, is_master=False)
    progress = (folder / f"rank{rank}").open("w")
    ends, number = time.monotonic() + 60 * options.minutes, options.first
    while True:
        if rank == 0:
            control.set(f"go {number}", "yes" if time.monotonic() < ends else "no")
        if control.get(f"go {number}") == b"no":
            return
        case = Case.draw(options.seed, number)
        ranks = case.replicas * case.shards
        progress.seek(0)
        print(number, case, file=progress, flush=True)
        if rank < ranks:
            torch.set_num_threads(case.threads)
            # Messages in flight keep gloo's connections open, with and without hooks: who loses rank 1 waits that long.
            limit = datetime.timedelta(seconds=10 if case.alone and case.breaks >= 0 else LIMIT_S)
            store = dist.PrefixStore(str(number), control)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
            try:
                one_training(options.subject, case, folder / f"saved {number}")
            finally:
                if number % 3:
                    gc.collect()
                time.sleep(0.01)  # torch 2.13: see tests/support/worker_side.py
                dist.destroy_process_group()
                _HELD.clear()
                forget_meshes()
                sys.excepthook = sys.__excepthook__  # each group puts another one around it
        number += 1


def one_training(subject: str, case: Case, folder: Path) -> None:
    # Where only rank 1 breaks off, the others lose it.
    expected = (Broken, RuntimeError) if case.breaks >= 0 and case.alone else (Broken,)
    with contextlib.suppress(*expected):
        if subject == "gloo":
            send_messages(case)
        else:
            train(case, folder, hooks=subject == "hooks")


def _quarantine(folder: Path) -> str:
    library = folder / "quarantine.so"
    source = Path(__file__).with_name("quarantine.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return str(library)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Start the ranks and wait for them. Returns how many trainings there were, or raises SystemExit if one died."""
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive"} | ALLOCATORS[options.allocator]
    if options.allocator == "quarantine":
        environ["LD_PRELOAD"] = _quarantine(folder)
    if options.torch_kernels:
        environ["COMMHOOKS_NATIVE"] = "0"
    control = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(RANKS)]
    command = [sys.executable, "-m", "tests.stress.heap", *sys.argv[1:], "--folder", str(folder)]
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [*command, "--rank", f"{rank}", "--port", f"{control.port}"], env=environ, stderr=log, stdout=log
        )
        for rank, log in enumerate(logs)
    ]
    limit = started + 60 * options.minutes + 5 * LIMIT_S
    while any(each.poll() is None for each in ranks) and not any(each.poll() for each in ranks):
        time.sleep(0.2)
        if time.monotonic() > limit:
            break
    if all(each.poll() == 0 for each in ranks):
        return int((folder / "rank0").read_text().split()[0]) - options.first + 1
    time.sleep(2)  # others may say why, too
    for rank, (each, log) in enumerate(zip(ranks, logs, strict=True)):
        code = each.poll()
        each.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of one that hangs
        each.wait()
        log.seek(0)
        print(f"rank {rank}: exit code {code}, in training {(folder / f'rank{rank}').read_text().splitlines()[0]}")
        print(log.read()[-6000:])
    raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--subject", choices=["hooks", "torch", "gloo"], default="hooks")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="quarantine")
    parser.add_argument("--torch-kernels", action="store_true", help="no native kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first training")
    for internal in ("--rank", "--port"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options, options.rank, options.port, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="commhooks-heap-", ignore_cleanup_errors=True) as folder:
        number = run(options, Path(folder))
    print(f"{options.subject}, allocator {options.allocator}: {number} trainings, and no rank died")


if __name__ == "__main__":
    main()
