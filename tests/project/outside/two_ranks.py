"""One of two ranks of a training: `python two_ranks.py RANK FOLDER`. Rank 0 prints what it used and
did, as JSON.
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("error")
import accelerate_commhooks  # noqa: E402, F401
import commhooks  # noqa: E402
import lightning_commhooks  # noqa: E402, F401

rank = int(sys.argv[1])
folder = sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook = commhooks.attach(model, commhooks.PowerSGD(start_powerSGD_iter=2))
for _ in range(4):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
hook.load_state_dict(hook.state_dict("mean"))
if rank == 0:
    print(
        json.dumps([commhooks.__file__, hook.stats()["compressed_steps"], hook.stats()["kernel"]])
    )
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook
