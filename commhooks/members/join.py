"""Bring this machine to the others: `join` returns the partner with which its model takes outer
steps.
"""

import dataclasses
from typing import Any

from commhooks.comm.collectives import agreement_key
from commhooks.comm.nodes import places_of, ranks_by_place
from commhooks.compressors.base import Compressor
from commhooks.errors import AttachError
from commhooks.gradients.source import GradientSource
from commhooks.members.machine_partner import MachinePartner
from commhooks.members.options import Torchft
from commhooks.members.peers import RanksOfMachine
from commhooks.members.report import VERSION
from commhooks.members.this_machine import ThisMachine


def join(
    options: Torchft, hook: str, compressor: Compressor[Any], source: GradientSource
) -> MachinePartner:
    """Let this machine come to the others. All ranks of the model must call this.

    Raises:
        HookConfigError: torchft is missing, or no lighthouse is given.
        AttachError: the model is on several machines, the lighthouse cannot be reached within
            `timeout_s`, or others could not reach this machine.
    """
    for group in filter(None, (source.group, source.shard_group)):
        machines = ranks_by_place(places_of(group, source.device))
        if len(machines) > 1:
            raise AttachError(
                f"members with a model on {len(machines)} machines ({', '.join(machines)}): each"
                " machine starts a job of its own, such as `torchrun --standalone`, and the hook"
                " connects them"
            )
    ranks = RanksOfMachine(source.group, source.shard_group, source.device)
    machine = ThisMachine(options, ranks, source.device)
    source.when_model_ends(machine.close)  # or the others would wait for it
    signature = _signature(hook, compressor, source, ranks) | _counting(options)
    return MachinePartner(machine, source, signature)


def _counting(options: Torchft) -> dict[str, str]:
    """Describe by name how machines count."""
    samples = "none" if options.samples_per_step is None else "given"
    return {"wait_for": options.wait_for, "use of samples_per_step": samples}


def _signature(
    hook: str, compressor: Compressor[Any], source: GradientSource, ranks: RanksOfMachine
) -> dict[str, str]:
    """Describe by name what must be equal on all machines. All ranks of the model must call this,
    and get the same.
    """
    shapes, whole, shards = source.described(), source.whole.named_parameters(), source.place[1]
    numbers = sum(parameter.numel() for parameter in whole.values())
    extents, key = [source.extent(name) for name in whole], ranks.key_of_shards
    return {
        "protocol between machines": str(VERSION),
        "hook": f"{hook} with {dataclasses.asdict(compressor.config)}",
        "number of ranks": str(source.group.size() * shards),
        "sharding": (
            "none"
            if source.shard_group is None
            else f"{shards} shards, key {key(agreement_key(extents)):x}"
        ),
        "model": (
            f"{len(shapes)} parameters, {numbers} trained numbers, key"
            f" {key(agreement_key(shapes)):x}"
        ),
    }
