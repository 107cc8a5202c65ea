"""Check in `attach` that all ranks attach the same hook to the same model, and can run it.

Otherwise the ranks would issue collectives of different sizes.
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
    """Compare what the ranks attach, and return the kernel that all of them will use.

    Requests, models and plans are compared over the ranks that average together, and requests over
    all shards. All ranks of the model must call this.

    Args:
        compressor: None for a user's function.
        loss_scale: whether this rank passes a loss scale.

    Raises:
        AttachError: on all ranks, if the requests or models differ, if some ranks cannot run the
            hook, or if the group does not number its ranks from 0; the message names the ranks.
        HookConfigError: no rank can run the hook.
    """
    check_futures(source.group, source.device)
    support = kernel_support(request, compressor, source)
    plans: list[UnitPlan] = []
    options = dict(request.options)
    if compressor is not None:
        options = dataclasses.asdict(compressor.config)
        plans = parameter_plans(compressor, source.names, source.sparse)
    described = _described(request, options, loss_scale)
    texts = [described, "\n".join(source.described()), "\n".join(map(repr, plans))]
    choice, shards = on_all_shards(
        lambda: _compare_replicas(texts, support, source.group, source.device),
        [agreement_key(described)],
        source.shard_group,
        source.device,
        AttachError,
    )
    if len({key for (key,) in shards}) > 1:
        assert source.shard_group is not None
        lines = _lines_of_ranks(described, source.shard_group, source.device)
        raise AttachError(_different_hooks(lines))
    return choice


def _compare_replicas(
    texts: list[str], support: KernelSupport, group: dist.ProcessGroup, device: torch.device
) -> KernelChoice:
    """`texts`: the request, the model and the plan of this rank, one line for each part."""
    numbers = [secrets.randbits(62), group.rank(), *map(agreement_key, texts), support.key]
    row = torch.tensor(numbers, dtype=torch.int64, device=device)
    table = gather_rows(row, group, None, _WHAT) if group.size() > 1 else row[None]
    drawn, ranks, *keys, supports = table.t().tolist()
    if len(set(drawn)) < group.size():
        raise AttachError(_nothing_gathered(group))
    if ranks != list(range(group.size())):
        raise AttachError(_unnumbered(group, ranks))
    sentences = (_different_hooks, _different_models, _different_plans)
    for text, of_ranks, sentence in zip(texts, keys, sentences, strict=True):
        if len(set(of_ranks)) > 1:
            raise AttachError(sentence(_lines_of_ranks(text, group, device)))
    return agreed_choice(support, supports, group, device, AttachError)


def _lines_of_ranks(text: str, group: dist.ProcessGroup, device: torch.device) -> list[list[str]]:
    return [gathered.split("\n") for gathered in gather_texts(text, group, device, _WHAT)]


def kernel_support(
    request: HookRequest, compressor: Compressor[Any] | None, source: GradientSource
) -> KernelSupport:
    if compressor is None:
        return KernelSupport()
    parameters = source.names.named_parameters().values()
    devices = {parameter.device for parameter in parameters}
    learns = compressor.transactional
    if learns or request.ranks_per_node is not None:
        try:
            precision.check_one_device(devices, compressor.display_name)
        except HookConfigError as error:  # other ranks may support it
            remedy = "" if learns else ", without ranks_per_node"
            return KernelSupport(cannot=f"{error}{remedy}")
    if not learns or not devices:
        return KernelSupport()
    dtypes = {parameter.dtype for parameter in parameters}
    return KernelSupport.of(compressor, devices.pop(), dtypes)


def _described(request: HookRequest, options: Mapping[str, Any], loss_scale: bool) -> str:
    """Describe the request in lines that are equal on two ranks if and only if the requests are."""
    # Compare a user's objects by their type only: their repr may contain an address.
    plain = (bool, int, float, str, type(None))

    def text_of(value: object) -> str:
        items = [*value, *value.values()] if type(value) is dict else value
        if isinstance(value, plain) or (
            type(items) is list and all(isinstance(item, plain) for item in items)
        ):
            return repr(value)
        return f"<{type(value).__qualname__}>"

    lines = [request.name, *(f"{name}={text_of(value)}" for name, value in options.items())]
    lines += [f"wrapper={request.wrapper!r}", f"save_residual={request.given_save_residual!r}"]
    lines += [f"check_every={request.check_every}", f"ranks_per_node={request.ranks_per_node!r}"]
    lines += [f"shards={request.shards}"]
    return "\n".join([*lines, f"loss_scale={'given' if loss_scale else None}"])


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
    ranks_by_hook: dict[str, list[str]] = {}
    for rank, (name, *settings) in enumerate(lines):
        differing = ", ".join(setting for setting in settings if setting not in common)
        ranks_by_hook.setdefault(name if several else differing, []).append(str(rank))
    hooks = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {hook}"
        for hook, ranks in ranks_by_hook.items()
    )
    return (
        f"the ranks attach different hooks: {hooks}. Give every rank the same hook, options and"
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
    rows = itertools.zip_longest(*lines, fillvalue="no parameter")
    for place, of_ranks in enumerate(rows):
        if len(set(of_ranks)) > 1:
            shown = listed(f"{line} on rank {rank}" for rank, line in enumerate(of_ranks))
            return f"parameter {place} is {shown}"
    raise AssertionError("no difference")
