"""A user's project with types: `make lint` checks it, and that each marked mistake is an error."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from accelerate_commhooks import CommHookKwargs
from lightning_commhooks import CommHookDDP, CommHookMonitor


def attach(ddp_model: DistributedDataParallel) -> commhooks.CommHook:
    config = commhooks.PowerSGD(matrix_approximation_rank=8, start_powerSGD_iter=0.1)
    hook = commhooks.attach(ddp_model, config, wrapper="bf16", check_every=100)
    hook.load_state_dict(hook.state_dict("mean"))
    print(hook.plan().compressed_share, hook.stats()["step"])
    return hook


def plugins() -> tuple[CommHookDDP, CommHookKwargs, CommHookMonitor]:
    options = {"matrix_approximation_rank": 2, "exclude": ["*embed*"]}
    strategy = CommHookDDP(hook="powerSGD", hook_options=options, bucket_cap_mb=50)
    return strategy, CommHookKwargs(hook="int8_compress"), CommHookMonitor()


def sharded(model: torch.nn.Module) -> dict[str, Any]:
    return commhooks.attach(model, commhooks.Int8Compress(), replicate_group=None).state_dict()


def mistakes(ddp_model: DistributedDataParallel) -> str:
    commhooks.attach(ddp_model, 4)  # pyright: ignore[reportArgumentType]
    commhooks.PowerSGD(matrix_approximation_rank="four")  # pyright: ignore[reportArgumentType]
    CommHookDDP(hook="powerSGD", hook_options="rank=4")  # pyright: ignore[reportArgumentType]
    CommHookKwargs(wrapper=16)  # pyright: ignore[reportArgumentType]
    return attach(ddp_model).plan()  # pyright: ignore[reportReturnType]
