"""Check in `attach` that all ranks attach the same hook to the same model, and that each rank can
run it. Otherwise the ranks would issue collectives of different sizes.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_rows, gather_texts, on_all_shards
from commhooks.comm.groups import check_futures
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.kernel_choice import KernelChoice, KernelSupport, agreed_choice
from commhooks.errors import AttachError, HookConfigError, listed
from commhooks.gradients import precision
from commhooks.gradients.source import GradientSource
from commhooks.plan import parameter_plans
from commhooks.request import HookRequest

_WHAT = "what each rank attaches (attach the hook on every rank, or on none)"


def check_arrangement(request: HookRequest, source: GradientSource) -> None:
    if source.shard_group is None:
        if request.shards is not None:
            raise HookConfigError(
                "shards with a model that fully_shard has not sharded: shards compresses FSDP2's"
                " own collectives; a hook such as 'int8_compress' compresses those of"
                " DistributedDataParallel"
            )
        return
    if request.ranks_per_node is not None:
        raise HookConfigError(
            f"ranks_per_node={request.ranks_per_node!r} with a model sharded by fully_shard: shard"
            " within each node instead, and the hook averages between nodes only"
        )


def check_on_all_ranks(
    request: HookRequest,
    compressor: Compressor[Any] | None,
    source: GradientSource,
    loss_scale: bool,
) -> KernelChoice:
    """Compare requests, models and plans over the ranks that average together, and requests over
    all shards. Returns the kernel that all ranks will use. All ranks of the model must call this.
    `compressor`: None for a user's function; `loss_scale`: whether this rank passes a loss scale.

    Raises:
        AttachError: on all ranks, if the requests or models differ, if some ranks cannot run the
            hook, or if the group does not number its ranks from 0; the message names the ranks.
        HookConfigError: no rank can run the hook.
    """
    group, shard_group, device = source.group, source.shard_group, source.device
    check_futures(group, device)
    support = kernel_support(request, compressor, source)
    plans: list[UnitPlan] = []
    options = dict(request.options)
    if compressor is not None:
        options = dataclasses.asdict(compressor.config)
        plans = parameter_plans(compressor, source.names, source.sparse)
    own_request = _described(request, options, loss_scale)
    texts = [own_request, "\n".join(source.described()), "\n".join(map(repr, plans))]

    def lines_of_ranks(text: str, group: dist.ProcessGroup) -> list[list[str]]:
        return [each.split("\n") for each in gather_texts(text, group, device, _WHAT)]

    def compare_replicas() -> KernelChoice:
        numbers = [secrets.randbits(62), group.rank(), *map(agreement_key, texts), support.key]
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        table = gather_rows(own, group, None, _WHAT) if group.size() > 1 else own[None]
        drawn, ranks, *keys, supports = table.t().tolist()
        if len(set(drawn)) < group.size():
            raise AttachError(_nothing_gathered(group))
        if ranks != list(range(group.size())):
            raise AttachError(_unnumbered(group, ranks))
        for text, of_ranks, different in zip(
            texts, keys, (_different_hooks, _different_models, _different_plans), strict=True
        ):
            if len(set(of_ranks)) > 1:
                raise AttachError(different(lines_of_ranks(text, group)))
        return agreed_choice(support, supports, group, device, AttachError)

    choice, shards = on_all_shards(
        compare_replicas, [agreement_key(own_request)], shard_group, device, AttachError
    )
    if len({key for (key,) in shards}) > 1:
        assert shard_group is not None
        raise AttachError(_different_hooks(lines_of_ranks(own_request, shard_group)))
    return choice


def kernel_support(
    request: HookRequest, compressor: Compressor[Any] | None, source: GradientSource
) -> KernelSupport:
    if compressor is None:
        return KernelSupport()
    parameters, learns = source.names.named_parameters().values(), compressor.transactional
    devices = {p.device for p in parameters}
    if learns or request.ranks_per_node is not None:
        try:
            precision.check_one_device(devices, compressor.display_name)
        except HookConfigError as error:  # other ranks may support it
            return KernelSupport(
                cannot=str(error) if learns else f"{error}, without ranks_per_node"
            )
    if not learns or not devices:
        return KernelSupport()
    return KernelSupport.of(compressor, devices.pop(), {p.dtype for p in parameters})


def _described(request: HookRequest, options: Mapping[str, Any], loss_scale: bool) -> str:
    """Describe the request in lines that are equal on two ranks if and only if the requests are."""
    # Compare a user's objects by their type only: their repr may contain an address.
    plain = (bool, int, float, str, type(None))

    def is_plain(v: object) -> bool:
        items = [*v, *v.values()] if type(v) is dict else v
        return isinstance(v, plain) or (
            type(items) is list and all(isinstance(item, plain) for item in items)
        )

    shown = [
        f"{k}={v!r}" if is_plain(v) else f"{k}=<{type(v).__qualname__}>" for k, v in options.items()
    ]
    shown += [f"wrapper={request.wrapper!r}", f"save_residual={request.form!r}"]
    shown += [f"check_every={request.check_every}", f"ranks_per_node={request.ranks_per_node!r}"]
    shown += [f"shards={request.shards}"]
    return "\n".join([request.name, *shown, f"loss_scale={'given' if loss_scale else None}"])


def _nothing_gathered(group: dist.ProcessGroup) -> str:
    return (
        f"a gather over this process group of {group.size()} ranks has returned nothing from the"
        " other ranks, so they cannot be compared. A fake process group, such as torch's for dry"
        " runs, sends nothing: leave out the hook in a dry run; the command `commhooks plan` shows"
        " what it would send"
    )


def _unnumbered(group: dist.ProcessGroup, ranks: list[int]) -> str:
    return (
        f"the ranks of this process group, a {type(group).__name__}, have the numbers"
        f" {listed(ranks)}, not 0 to {group.size() - 1}: its rank() does not return this one's"
        " number, as with the groups of torchft 0.2. Make a subclass whose rank() returns the"
        " number that the group was configured with"
    )


def _different_hooks(lines: list[list[str]]) -> str:
    several = len({name for name, *_ in lines}) > 1
    common = set.intersection(*(set(settings) for _, *settings in lines))
    ranks: dict[str, list[str]] = {}
    for rank, (name, *settings) in enumerate(lines):
        own = name if several else ", ".join(each for each in settings if each not in common)
        ranks.setdefault(own, []).append(str(rank))
    found = "; ".join(
        f"rank{'s' * (len(each) > 1)} {listed(each)}: {own}" for own, each in ranks.items()
    )
    return (
        f"the ranks attach different hooks: {found}. Give every rank the same hook, options and"
        " wrapper"
    )


def _different_models(lines: list[list[str]]) -> str:
    return f"the ranks have different models: {_first_difference(lines)}"


def _different_plans(lines: list[list[str]]) -> str:
    return (
        f"the ranks compress different things: {_first_difference(lines)}. A compressor must decide"
        " from names, shapes and options alone"
    )


def _first_difference(lines: list[list[str]]) -> str:
    for place, found in enumerate(itertools.zip_longest(*lines, fillvalue="no parameter")):
        if len(set(found)) > 1:
            return f"parameter {place} is " + listed(
                f"{x} on rank {r}" for r, x in enumerate(found)
            )
    raise AssertionError("no difference")
