"""`commhooks network`: measure the network between the ranks."""

import argparse
import json
import math
import time

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_texts, resolve_group
from commhooks.comm.groups import backend_of
from commhooks.comm.nodes import members_of, places_of
from commhooks.errors import DoctorError, HookConfigError
from commhooks.tools.arguments import NETWORK_COMMAND
from commhooks.tools.measuring import process_group
from commhooks.tools.network import interfaces
from commhooks.tools.network.link import measure_link, measure_pairs, pairs_to_measure
from commhooks.tools.network.predicted import cluster_of, exchanges, parsed_size
from commhooks.tools.network.report import NetworkReport

START_IT = (
    "the network between the ranks of a training is measured. Start this as you start the training, on every machine: "
    f"{NETWORK_COMMAND}"
)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. All ranks must call this; rank 0 prints."""
    sizes = {text: parsed_size(text) for text in arguments.params}
    if arguments.step_ms is not None and not 0 < arguments.step_ms < math.inf:
        raise HookConfigError(f"--step-ms {arguments.step_ms}: expected a number above 0")
    with process_group(arguments.backend, START_IT):
        group = resolve_group()
        report = measure(group, sizes, arguments.step_ms)
        if group.rank() == 0:
            print(json.dumps(report.as_dict(), indent=1) if arguments.json else report, flush=True)
        dist.barrier()
    return 0


def measure(group: dist.ProcessGroup, sizes: dict[str, float], step_ms: float | None) -> NetworkReport:
    """Measure the network between the ranks of `group`. All of them must call this; all get the same report.

    Args:
        sizes: numbers of parameters, by what to call them.
        step_ms: a step without a network, if it is known.

    Raises:
        DoctorError: there is one rank.
        HookRunError: another rank has failed, or did not take part within the process group's timeout.
    """
    if group.size() == 1:
        raise DoctorError(f"there is one rank, and no network to measure: {START_IT}")
    began, device = time.perf_counter(), _device(group)
    machines = _named(members_of(places_of(group, device)))
    before = interfaces.sent_bytes()
    link = measure_link(group, device)
    pairs = measure_pairs(pairs_to_measure(list(machines.values())), group, device)
    own = interfaces.busiest(before, others=len(machines) > 1)
    texts = gather_texts(json.dumps([own.name, own.rated_mbit_per_s]), group, device, "the names of the interfaces")
    of_ranks = [interfaces.Interface(*json.loads(text)) for text in texts]
    inside = [p.mbit_per_s for p in pairs if any({*p.ranks} <= {*ranks} for ranks in machines.values())]
    cluster = cluster_of(
        list(machines.values()),
        link,
        max(inside, default=link.mbit_per_s),
        "nccl" if backend_of(group, device) == "nccl" else "gloo",
    )
    return NetworkReport(
        machines=machines,
        interfaces={name: of_ranks[ranks[0]] for name, ranks in machines.items()},
        backend=backend_of(group, device),
        pairs=pairs,
        link=link,
        exchanges={text: exchanges(size, cluster) for text, size in sizes.items()},
        step_ms=step_ms,
        took_s=time.perf_counter() - began,
    )


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors are that the ranks send: on a GPU if the backend needs that."""
    on_gpu = torch.cuda.is_available() and backend_of(group, torch.device("cuda")) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _named(machines: dict[str, list[int]]) -> dict[str, list[int]]:
    """The machines by the names of their hosts, where these differ: two launchers may run on one."""
    hosts = [place.partition(" ")[0] for place in machines]
    return dict(zip(hosts, machines.values(), strict=True)) if len({*hosts}) == len(hosts) else machines
