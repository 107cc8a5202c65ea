"""Step time of real DDP training over a slow link, and the bytes that travelled.

    sudo python benchmarks/link.py [--rates 100mbit 1gbit] [--hooks noop ddp powersgd-1] [--models transformer]
                                   [--compute light heavy] [--steps 5] [--nodes 2] [--ranks-per-node 1]

--nodes nodes (two): network namespaces, joined by a veth pair or a bridge, and `tc tbf` limits what each sends: gloo
has no other way. Each has --ranks-per-node ranks. The processes of a model, its data and one DDP model per hook stay
for all rates; the first steps, in which DDP rebuilds its buckets and PowerSGD has not begun, run on the open link. Then
the hooks take turns. A step is forward, backward and SGD on one torch thread per rank, from a common start to the end
of the slowest rank.

  light, heavy   transformer (29.4 M parameters): 64 and 512 tokens per rank; resnet18: 8 and 64 images of 64 x 64
  cost removed   the share of the network's cost that the hook takes away: 1 - (hook - noop) / (ddp - noop), of medians.
                 100 % is a step as fast as without communication
  MB sent        what the interface of rank 0's node sent for a step (/sys/class/net/*/statistics), headers included,
                 and less than 1 kB with which the ranks compare their times
  codec          the hook's own time in a step, without waiting: the mean over the ranks
  state          residuals and factors of the rank that has most of them

Hooks that choose (auto, auto-close) begin anew at each rate and amount of computation, with a new model, and decide
before they are measured, after a dozen of plain steps. The column "chosen" says what they do.

Hooks have DDP's usual buckets (25 MB), torch's PowerSGD (torch-RANK) has one: with more it hangs on gloo. A hook that
has used --seconds at one rate takes no further part there: plain DDP needs 94 s for a step of the transformer at
10mbit.

Needs Linux, root, `ip` and `tc`. The namespaces have names of this run's own and are removed at its end, also after
Ctrl-C and after errors. Without network shaping of your own: a subset in about 3 minutes is

    sudo python benchmarks/link.py --models transformer --rates 100mbit 1gbit --compute light --steps 5 --seconds 12
"""

import contextlib
import datetime
import json
import os
import queue
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, number, parse, parser, report, spread, steady, summary
from hooks import CHOOSING, LABELS, wrap
from machine import machine
from models import forward_loss, make, numel

RATES = ["10mbit", "100mbit", "1gbit", "10gbit", "unlimited"]
HOOKS = ["noop", "ddp", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "torch-1", "torch-4"]
SIZES = {
    "transformer": {"light": 64, "heavy": 512},
    "resnet18": {"light": 8, "heavy": 64},
    "tiny_transformer": {"light": 64, "heavy": 128},
}
START, WARM_UP, PORT = 2, 4, 29500
DECIDED_WITHIN = 60
SUBNET = "198.18.0"  # from the block for benchmarks (RFC 2544); used only inside the namespaces


# ---- the link --------------------------------------------------------------------------------------------------------


class Link:
    """A namespace per node, removed on exit: two joined by a veth pair, more by a bridge in one more namespace."""

    def __init__(self, nodes: int) -> None:
        sides = string.ascii_lowercase[:nodes]
        self.namespaces = [f"commhooks-{os.getpid()}-{side}" for side in sides]
        self.interfaces = [f"ch{os.getpid()}{side}" for side in sides]
        self._bridge = f"commhooks-{os.getpid()}-bridge" if nodes > 2 else None

    def __enter__(self) -> "Link":
        try:
            for namespace in self.namespaces:
                _run("ip", "netns", "add", namespace)
            if self._bridge is None:
                (a, b), (one, two) = self.namespaces, self.interfaces
                _run("ip", "link", "add", one, "netns", a, "type", "veth", "peer", "name", two, "netns", b)
            else:
                self._join(self._bridge)
            for host, (namespace, interface) in enumerate(self.ends(), 1):
                _run("ip", "-n", namespace, "addr", "add", f"{SUBNET}.{host}/24", "dev", interface)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
                _run("ip", "-n", namespace, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
        for namespace in [*self.namespaces, *([] if self._bridge is None else [self._bridge])]:  # and with it its links
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        signal.signal(signal.SIGINT, before)

    def _join(self, bridge: str) -> None:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for namespace, interface in self.ends():
            port = f"{interface}p"
            _run(
                "ip",
                "link",
                "add",
                interface,
                "netns",
                namespace,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                bridge,
            )
            _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")

    def ends(self) -> Iterator[tuple[str, str]]:
        return zip(self.namespaces, self.interfaces, strict=True)

    def limit(self, rate: str) -> None:
        """Limit what each node sends: for two nodes both directions. The token bucket holds 1 ms of the rate, so that
        short messages are limited, too."""
        for namespace, interface in self.ends():
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"], capture_output=True)
            if rate != "unlimited":
                burst = max(10_000, int(bits_per_second(rate) / 8 / 1000))
                shape = ("tbf", "rate", rate, "burst", str(burst), "limit", str(max(10_000_000, 2 * burst)))
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shape)


def bits_per_second(rate: str) -> float:
    """Convert a rate in tc's notation (10mbit, 1gbit) to bit/s."""
    for unit, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rates {rate}: expected a number of kbit, mbit or gbit, for example 100mbit, or unlimited")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def missing() -> str | None:
    """The reason why this machine cannot run the benchmark, as a sentence; None if it can."""
    if not sys.platform.startswith("linux"):
        return "link.py needs Linux: network namespaces and tc"
    if os.geteuid() != 0:
        return "link.py needs root, to make network namespaces and to limit a link: run it with sudo"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"link.py needs {' and '.join(tools)} (package iproute2)"
    return None


# ---- a rank ----------------------------------------------------------------------------------------------------------


def worker(rank: int, world_size: int, ranks_per_node: int, interface: str, model_name: str, hooks: list[str]) -> None:
    """Make the models, then run one job per line of stdin; rank 0 writes one line of JSON per job to stdout."""
    torch.set_num_threads(1)
    sent_bytes = Path("/sys/class/net", interface, "statistics", "tx_bytes")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{SUBNET}.1:{PORT}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=30),
    )
    task = make(model_name)[1]

    def new(label: str) -> Any:
        model, _ = make(model_name)
        wrapped = wrap(model, label, start=START, ranks_per_node=ranks_per_node)
        return wrapped, torch.optim.SGD(model.parameters(), lr=1e-3)

    models = {label: new(label) for label in hooks}

    def step(label: str, batch: Any) -> tuple[float, int]:
        """(seconds on the slower rank, bytes sent by this rank) of one step."""
        (ddp_model, _), optimizer = models[label]
        dist.barrier()
        before, started = int(sent_bytes.read_text()), time.perf_counter()
        forward_loss(ddp_model, task, batch).backward()
        optimizer.step()
        passed = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(passed, dist.ReduceOp.MAX)
        # Read the counter after that message: until then data of the hook may be in the queue of the link.
        return passed.item(), int(sent_bytes.read_text()) - before

    def job(size: int, steps: int, seconds: float, warms_up: bool = False) -> dict[str, Any]:
        torch.manual_seed(rank)
        batch = task.batch(size)
        decided = {label: decide(label, batch) for label in hooks if label in CHOOSING and not warms_up}
        before = {label: codec_s(label) for label in hooks}
        found: dict[str, list[tuple[float, int]]] = {label: [] for label in hooks}
        for turn in range(steps):
            for label in hooks[turn % len(hooks) :] + hooks[: turn % len(hooks)]:
                # Both ranks have the same times, those of the slower rank, so they make the same decision.
                if not found[label] or sum(passed for passed, _ in found[label]) < seconds:
                    found[label].append(step(label, batch))
        codec = [(codec_s(label) - before[label]) / len(found[label]) for label in hooks]
        state = [state_bytes(label) for label in hooks]
        everywhere = torch.tensor([codec, state], dtype=torch.float64)
        total, largest = everywhere.clone(), everywhere
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {
            label: {
                "samples": list(zip(*found[label], strict=True)),
                "codec_s": total[0, place].item() / world_size,
                "state_bytes": largest[1, place].item(),
                **decided.get(label, {}),
            }
            for place, label in enumerate(hooks)
        }

    def decide(label: str, batch: Any) -> Row:
        """Let the hook begin anew and decide; equal on all ranks."""
        models[label] = new(label)
        hook, spent_s, steps = models[label][0][1], 0.0, 0
        while steps < DECIDED_WITHIN and (notes := hook.state_dict("drop")["notes"])["phase"] != "resting":
            spent_s += step(label, batch)[0]
            steps += 1
        return {
            "chosen": hook.stats()["chosen"],
            "decided_after": notes["since"],
            "deciding_s": spent_s,
            "why": notes["why"],
        }

    def codec_s(label: str) -> float:
        hook = models[label][0][1]
        return 0.0 if hook is None else hook.stats()["codec_s"] or 0.0

    def state_bytes(label: str) -> int:
        hook = models[label][0][1]
        return 0 if hook is None or ":fsdp2" in label else size_of(hook.state_dict("per_rank"))

    answer = job(SIZES[model_name]["light"], WARM_UP, float("inf"), warms_up=True)
    while True:
        if rank == 0:
            compressed = {label: hook.stats()["compressed_steps"] for label, ((_, hook), _) in models.items() if hook}
            print(json.dumps({"hooks": answer, "compressed": compressed}), flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        answer = job(**json.loads(line))
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook


def size_of(saved: dict[str, Any]) -> int:
    """Bytes of the residuals and factors in a payload."""
    kept = [each for entry in saved.get("parameters", {}).values() for each in (entry["q"], *(entry["residual"] or []))]
    return sum(each.nbytes for each in kept if each is not None)


class Ranks:
    """The processes of one model, those of a node in its namespace."""

    def __init__(self, link: Link, model: str, hooks: list[str], folder: str, ranks_per_node: int) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        world_size = len(link.namespaces) * ranks_per_node
        self.errors = [Path(folder, f"{model}_{rank}.txt") for rank in range(world_size)]
        for rank, (namespace, interface) in enumerate(each for each in link.ends() for _ in range(ranks_per_node)):
            common = {"ranks_per_node": ranks_per_node, "interface": interface, "model_name": model, "hooks": hooks}
            order = json.dumps({"rank": rank, "world_size": world_size, **common})
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, sys.executable, __file__, "--worker", order],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=open(self.errors[rank], "w"),
                    text=True,
                )
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            self._answers.put(line)

    def answer(self, timeout_s: float) -> Row:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                return json.loads(self._answers.get(timeout=0.5))
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"rank {ended[0]} has ended" if ended else f"no answer in {timeout_s:.0f} s"
                tail = "\n".join(self.errors[ended[0] if ended else 0].read_text().splitlines()[-15:])
                raise RuntimeError(f"{what}; the last that it said:\n{tail}")

    def job(self, timeout_s: float, **order: Any) -> Row:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self.answer(timeout_s)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


# ---- main ------------------------------------------------------------------------------------------------------------


def rows_of(answer: Row, hooks: list[str], **common: Any) -> list[Row]:
    rows = []
    for label in hooks:
        of_hook = answer["hooks"][label]
        times, sent = of_hook["samples"]
        row = {**common, "hook": label, **summary([1000 * each for each in times], "ms"), "steps": len(times)}
        row |= {key: of_hook.get(key) for key in ("chosen", "decided_after", "deciding_s", "why")}
        row |= {"codec_ms": 1000 * of_hook["codec_s"], "state_mb": of_hook["state_bytes"] / 1e6}
        rows.append(row | {"bytes_per_step": summary(sent, "b")["median_b"], "samples_ms": [1000 * t for t in times]})
    medians = {row["hook"]: row["median_ms"] for row in rows}
    for row in rows:
        row["megabytes"] = row["bytes_per_step"] / 1e6
        row["times_noop"] = row["median_ms"] / medians["noop"] if "noop" in medians else None
        row["faster_than_ddp"] = medians["ddp"] / row["median_ms"] if "ddp" in medians else None
        row["cost_removed"] = None
        if medians.get("ddp", 0) > medians.get("noop", float("inf")):
            row["cost_removed"] = 1 - (row["median_ms"] - medians["noop"]) / (medians["ddp"] - medians["noop"])
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rates", nargs="+", default=RATES, help="as tc writes them, or unlimited")
    arguments.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    arguments.add_argument("--models", nargs="+", choices=list(SIZES), default=["transformer", "resnet18"])
    arguments.add_argument("--compute", nargs="+", choices=["light", "heavy"], default=["light", "heavy"])
    arguments.add_argument("--steps", type=int, default=7, help="per hook and rate, at most")
    arguments.add_argument("--seconds", type=float, default=30, help="per hook and rate; one step at least")
    arguments.add_argument("--nodes", type=int, choices=range(2, 9), default=2)
    arguments.add_argument("--ranks-per-node", type=int, default=1)
    arguments.add_argument("--worker", help="for the program's own use")
    quick = {"rates": ["100mbit"], "hooks": ["noop", "ddp", "powersgd-1"], "models": ["tiny_transformer"]}
    args = parse(arguments, **quick, compute=["light"], steps=3)
    if args.worker is not None:
        order = json.loads(args.worker)
        with steady(order["rank"]):
            worker(**order)
    for rate in args.rates:
        if rate != "unlimited":
            bits_per_second(rate)
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so that the namespaces are removed
    at, rows = machine(), []
    with Link(args.nodes) as link, tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            gradient = 4 * numel(make(model)[0])
            link.limit("unlimited")
            ranks = Ranks(link, model, args.hooks, folder, args.ranks_per_node)
            try:
                ranks.answer(timeout_s=600)
                for compute in args.compute:
                    for rate in args.rates:
                        link.limit(rate)
                        # Four times the duration of a plain all-reduce of all gradients per step, at most one hour.
                        wire_s = 0 if rate == "unlimited" else 8 * gradient / bits_per_second(rate)
                        limit_s = min(3600, 300 + len(args.hooks) * (args.seconds + 4 * wire_s) * 2)
                        limit_s += len(CHOOSING.keys() & set(args.hooks)) * DECIDED_WITHIN * (4 * wire_s + 5)
                        size = SIZES[model][compute]
                        answer = ranks.job(limit_s, size=size, steps=args.steps, seconds=args.seconds)
                        idle = [x for x, n in answer["compressed"].items() if x.startswith("powersgd") and not n]
                        if idle:
                            raise RuntimeError(f"{idle} compressed no step")
                        section = f"{model} {compute} {rate}"
                        common = {"section": section, "model": model, "compute": compute, "batch": size, "rate": rate}
                        common |= {"nodes": args.nodes, "ranks_per_node": args.ranks_per_node}
                        rows += rows_of(answer, args.hooks, **common, gradient_mb=gradient / 1e6)
                        print(f"{section}: done", file=sys.stderr, flush=True)
            finally:
                ranks.end()
    columns = {
        "model": number("model"),
        "compute": number("compute"),
        "rate": number("rate"),
        "hook": number("hook"),
        "step, ms: median (quartiles)": spread("ms", 0),
        "cost removed": number("cost_removed", "{:.1%}"),
        "steps": number("steps"),
        "MB sent": number("megabytes", "{:.3f}"),
        "codec, ms": number("codec_ms", "{:.1f}"),
        "state, MB": number("state_mb", "{:.1f}"),
        "chosen": number("chosen"),
        "x noop": number("times_noop", "{:.2f}"),
        "x faster than ddp": number("faster_than_ddp", "{:.2f}"),
    }
    report("link", f"link: DDP training of {args.nodes} nodes over a limited link", args, at, rows, columns)


if __name__ == "__main__":
    main()
