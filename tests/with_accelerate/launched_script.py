"""A script as users write it, started by test_accelerate_launcher.py: notes what it has got, and
takes three steps.

launched_script.py FOLDER whatever else
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerators import pretend_to_have_accelerators

sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
if sharded:
    pretend_to_have_accelerators()
handler = CommHookKwargs(bucket_cap_mb=3)
accelerator = Accelerator(cpu=True)
handler.attach(accelerator)  # with DDP and with FSDP2
model: torch.nn.Module = torch.nn.Linear(64, 64)
if sharded:
    model = torch.nn.Sequential(model)  # Accelerate 1.15 cannot load a model without modules in it
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
else:
    model = accelerator.prepare(model)
for step in range(3):
    accelerator.backward(
        model(torch.full((2, 64), step + accelerator.process_index + 1.0)).square().mean()
    )
seen = {
    "arguments": sys.argv[2:],
    "main": __name__,
    "handler": repr(handler),
    "processes": accelerator.num_processes,
    "stats": handler.attached.stats() if handler.attached else None,
    "mesh": str(next(model.parameters()).device_mesh) if sharded else None,
    "rank_variable": os.environ.get("RANK"),
}
folder = Path(sys.argv[1])
(folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(seen))
accelerator.wait_for_everyone()
accelerator.end_training()
sys.stdout.flush()
os._exit(0)
