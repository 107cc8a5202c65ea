"""How interpreters end after a training with Accelerate on two CPU ranks, with a hook and without.

    make exits ARGS="[--runs 150] [--hooks none powerSGD int8_compress] [--ends destroy none]"

Plain DDP on gloo now and then ends in "terminate called without an active exception", or hangs, while the interpreter
exits: docs/reliability.md says why. This counts how often, for each hook and each way to end. The ranks are forked from
a process that has imported everything, so that a run takes a fraction of a second; they end as any Python program does.
As under torchrun, the store of the ranks lives in another process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

STEPS = 6
LIMIT_S = 12
"""A rank that has not ended by then hangs."""
STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def train(hook: str, end: str, folder: str, port: int, run: str) -> None:
    """What a rank does: some steps, perhaps a joint save, and the end that Accelerate's own scripts have."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator

    from accelerate_commhooks import CommHookKwargs

    # Not by Accelerate: under torchrun, too, all runs would find each other's addresses in this store.
    store = dist.PrefixStore(run, dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    options = {"start_powerSGD_iter": 2} if hook == "powerSGD" else None
    handler = CommHookKwargs(hook=None if hook == "none" else hook, hook_options=options, save_residual="mean")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.num_processes == 2
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(16, 64)).square().mean())
        optimizer.step()
    if handler.attached is not None and end == "saved":
        accelerator.save_state(folder)
    if end != "none":
        accelerator.state.destroy_process_group()


def one_run(number: int, port: int, hook: str, end: str) -> list[str]:
    """How the two ranks of a run end: "0", another exit status, a signal, with the last line on stderr."""
    folder = tempfile.mkdtemp(prefix="exits-")  # not as a context, which the ranks would leave, too
    pids = [_fork_rank(rank, number, port, hook, end, folder) for rank in range(2)]
    deadline = time.monotonic() + LIMIT_S
    found = []
    for rank, pid in enumerate(pids):
        status = _waited_for(pid, deadline)
        text = Path(folder, f"stderr-{rank}").read_text().strip()
        said = text.rpartition("\n")[2][:100] if status != "hung" else ""
        found.append("0" if status == 0 else f"{status} {said}".strip())
    shutil.rmtree(folder)
    return found


def _fork_rank(rank: int, number: int, port: int, hook: str, end: str, folder: str) -> int:
    """Fork a rank, which leaves this function with SystemExit. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    train(hook, end, folder, port, str(number))
    raise SystemExit(0)


def _waited_for(pid: int, deadline: float) -> int | str:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)  # at least once: the rank before may have used up the time
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hung"


def _import_everything() -> None:
    """What the ranks use, without starting a thread."""
    import torch
    import torch._dynamo  # the first optimizer does this

    import accelerate_commhooks

    accelerate_commhooks.CommHookKwargs(hook="powerSGD").to_kwargs()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


def in_words(hook: str, counts: Counter[str]) -> str:
    """What became of the exits with a hook."""
    bad = [f"{count} {how}" for how, count in counts.items() if how != "0"]
    return f"{hook} {sum(counts.values())} exits, {' and '.join(bad) or 'all good'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=150, help="of each kind; two exits each")
    parser.add_argument("--hooks", nargs="+", default=["none", "powerSGD", "int8_compress"])
    parser.add_argument("--ends", nargs="+", choices=["destroy", "none", "saved"], default=["destroy", "saved", "none"])
    args = parser.parse_args()
    store = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    port = int(store.stdout.readline())
    _import_everything()
    number = 0
    for end in args.ends:
        seen: dict[str, Counter[str]] = {hook: Counter() for hook in args.hooks}
        for _ in range(args.runs):
            for hook in args.hooks:  # in turn, so that the machine is as busy for each
                number += 1
                seen[hook].update(one_run(number, port, hook, end))
        print(f"{end}: " + ", ".join(in_words(hook, counts) for hook, counts in seen.items()), flush=True)
    store.communicate("")
    return 0


if __name__ == "__main__":
    sys.exit(main())
