"""The methods of peers.py, an adapter for each: with the settings of its own documentation, which
the adapter names.

torch's hooks are those of torch 2.13, whose docstrings are their documentation. What an adapter
needs is imported inside it, so that a method whose project is not installed only fails itself.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from limited_link import SUBNET
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import commhooks

SEQUENCES = 4  # of a rank, in a step
LIGHTHOUSE_PORT = 29510
ONE_BUCKET_MB = 10_000


@dataclass
class Training:
    """What an adapter gets. `exact`: steps of all-reduce before the method begins."""

    rank: int
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    exact: int

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.rank + 1}"


@dataclass
class Loop:
    """The model to call, and what to call after each backward pass."""

    model: nn.Module
    step: Callable[[], Any]
    chosen: Callable[[], str] = str


Adapter = Callable[[Training], AbstractContextManager[Loop]]
Register = Callable[[DistributedDataParallel, Training], Any]


@contextlib.contextmanager
def with_ddp(run: Training, register: Register | None = None, **ddp: Any) -> Iterator[Loop]:
    wrapped = DistributedDataParallel(run.model, **ddp)
    if register is not None:
        register(wrapped, run)
    yield Loop(wrapped, run.optimizer.step)


def cast(hook: Callable[..., Any]) -> Register:
    return lambda wrapped, run: wrapped.register_comm_hook(None, hook)


def torch_powersgd(wrapped: DistributedDataParallel, run: Training) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=max(2, run.exact)
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@contextlib.contextmanager
def torch_post_local(run: Training) -> Iterator[Loop]:
    """Period and warm-up are those of the docstring of PostLocalSGDOptimizer, torch 2.13."""
    wrapped = DistributedDataParallel(run.model)
    alone, _ = dist.new_subgroups(group_size=1)  # a rank is a machine
    state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=run.exact)
    wrapped.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=run.exact)
    yield Loop(wrapped, PostLocalSGDOptimizer(run.optimizer, averager).step)


@contextlib.contextmanager
def accelerate_local_sgd(run: Training) -> Iterator[Loop]:
    """https://huggingface.co/docs/accelerate/usage_guides/local_sgd, Accelerate 1.15."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != run.ranks:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes")
    wrapped, optimizer = accelerator.prepare(run.model, run.optimizer)
    with LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=8) as local_sgd:

        def step() -> None:
            optimizer.step()
            local_sgd.step()

        yield Loop(wrapped, step)


@contextlib.contextmanager
def torchft_manager(run: Training) -> Iterator[Any]:
    """https://github.com/meta-pytorch/torchft/blob/main/train_diloco.py, torchft 0.2; its limits
    are longer here, because a round over 10 Mbit/s takes longer than they allow.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    lighthouse = None
    if run.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=run.ranks, join_timeout_ms=10_000
        )
    store = dist.TCPStore(run.address, 0, is_master=True, wait_for_workers=False)
    dist.barrier()
    limit = datetime.timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=run.ranks,
        use_async_quorum=False,
        init_sync=False,  # all have the same weights
        replica_id=f"replica_{run.rank}",
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr=run.address,
        store_port=store.port,
        lighthouse_addr=f"http://{SUBNET}.1:{LIGHTHOUSE_PORT}",
        hostname=run.address,
    )
    yield manager
    dist.barrier()
    manager.shutdown(wait=False)
    del lighthouse


@contextlib.contextmanager
def torchft_diloco(run: Training) -> Iterator[Loop]:
    """Outer optimizer and rounds of train_diloco.py."""
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(run.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with torchft_manager(run) as manager:
        with DiLoCo(manager, [run.model], run.optimizer, outer, sync_every=20):
            yield Loop(run.model, run.optimizer.step)


@contextlib.contextmanager
def torchft_local_sgd(run: Training) -> Iterator[Loop]:
    """`examples/localsgd/train_localsgd.py` communicates every 100 steps."""
    from torchft.local_sgd import LocalSGD

    with torchft_manager(run) as manager:
        with LocalSGD(manager, run.model, run.optimizer, sync_every=100):
            yield Loop(run.model, run.optimizer.step)


@contextlib.contextmanager
def with_hivemind(run: Training) -> Iterator[Loop]:
    """https://learning-at-home.readthedocs.io/en/latest/user/quickstart.html, hivemind 1.1.12:
    weights are averaged in the background after 10,000 samples in batches of 32, which are 156
    steps of two peers; here with 8 bits.
    """
    import hivemind

    address = [f"/ip4/{run.address}/tcp/0"]
    peers: list[Any] = [None]
    if run.rank == 0:
        dht = hivemind.DHT(host_maddrs=address, start=True)
        peers = [[str(maddr) for maddr in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(peers)
    if run.rank > 0:
        dht = hivemind.DHT(host_maddrs=address, initial_peers=peers[0], start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="run",
        batch_size_per_step=SEQUENCES,
        target_batch_size=SEQUENCES * 10_000 // 32,
        optimizer=run.optimizer,
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=10.0,
        state_averaging_compression=hivemind.compression.Uniform8BitQuantization(),
    )
    rounds = optimizer.local_epoch
    yield Loop(run.model, optimizer.step, lambda: f"{optimizer.local_epoch - rounds} rounds")
    dist.barrier()
    optimizer.shutdown()
    dht.shutdown()


@contextlib.contextmanager
def ours(run: Training, config: Any) -> Iterator[Loop]:
    wrapped = DistributedDataParallel(run.model)
    hook = commhooks.attach(wrapped, config)
    yield Loop(wrapped, run.optimizer.step, lambda: hook.stats().get("chosen") or "")
    hook.close()


@dataclass(frozen=True)
class Method:
    """A row.

    Attributes:
        every: steps of a round.
        exact: steps of all-reduce before it begins, in a whole run.
        settles: steps after which all cost the same; the first ones are timed as they are.
        once: only runs once, to show that it fails.
    """

    adapter: Adapter
    every: int = 1
    exact: int = 0
    settles: int = 0
    once: bool = False


BASE = "plain DDP"
with_torch_powersgd = functools.partial(with_ddp, register=torch_powersgd)
METHODS = {
    BASE: Method(with_ddp),
    "torch fp16": Method(
        functools.partial(with_ddp, register=cast(default_hooks.fp16_compress_hook))
    ),
    "torch bf16": Method(
        functools.partial(with_ddp, register=cast(default_hooks.bf16_compress_hook)), once=True
    ),
    "torch PowerSGD 4": Method(with_torch_powersgd, exact=40, once=True),
    "torch PowerSGD 4, one bucket": Method(
        functools.partial(with_torch_powersgd, bucket_cap_mb=ONE_BUCKET_MB), exact=40
    ),
    "torch post-local SGD": Method(torch_post_local, every=4, exact=100),
    "Accelerate LocalSGD": Method(accelerate_local_sgd, every=8),
    "torchft LocalSGD": Method(torchft_local_sgd, every=100),
    "torchft DiLoCo": Method(torchft_diloco, every=20),
    "hivemind": Method(with_hivemind, every=156),
    "commhooks auto": Method(functools.partial(ours, config="auto"), settles=50),
    "commhooks int4": Method(functools.partial(ours, config="int4_compress")),
    "commhooks diloco": Method(functools.partial(ours, config=commhooks.DiLoCo()), every=5),
    "commhooks diloco, every 20": Method(
        functools.partial(ours, config=commhooks.DiLoCo(sync_every=20)), every=20
    ),
}
