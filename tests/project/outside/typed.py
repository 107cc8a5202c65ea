"""A project with types, in which type checkers find nothing but the lines that say so."""

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
    commhooks.attach(ddp_model, 4)  # wrong
    commhooks.PowerSGD(matrix_approximation_rank="four")  # wrong
    CommHookDDP(hook="powerSGD", hook_options="rank=4")  # wrong
    CommHookKwargs(wrapper=16)  # wrong
    return attach(ddp_model).plan()  # wrong
