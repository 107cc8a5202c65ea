"""Compare the ranks before a bucket is reduced: at the start, after a load, and after a change of
the compressor.

The step number and the options determine which collectives a step runs: ranks that disagree on them
would pair collectives of different sizes, so that gloo aborts and NCCL hangs. Error feedback needs
the residuals of all ranks, or none.
"""

import collections
import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Send, agreement_key, gather_rows, gather_texts, on_all_shards
from commhooks.comm.counters import Counters
from commhooks.comm.groups import is_logging_rank
from commhooks.compressors.base import Compressor
from commhooks.engine.buckets import KnownBuckets
from commhooks.engine.kernel_choice import KernelChoice, KernelSupport, agreed_choice
from commhooks.engine.reduction import FLAT, FlatReduction
from commhooks.engine.state import HeldState
from commhooks.errors import HookRunError, listed, logger_of
from commhooks.gradients.layout import Bucket
from commhooks.gradients.loss_scale import LossScale
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.precision import dtype_name, keep_for_current_stream

logger = logger_of(__name__)
Started = TypeVar("Started")
_WHAT = "the comparison of what the ranks send"
_SHOWN = 4
"""How many different Sends an error lists."""


@dataclass(frozen=True)
class Agreement:
    """Holds what is valid from one comparison of the ranks to the next.

    Compression begins after `start` committed steps.
    """

    start: int
    exact_step: bool


@dataclass(frozen=True)
class Binding:
    """Describes the model whose gradients a session averages, and the ranks.

    Attributes:
        group: returns the process group; called at each backward pass.
        loss_scale: returns the current scale of the GradScaler; None without a scaler.
        shards: returns the group of the ranks with all shards of this replica, which commit a pass
            together or not at all.
    """

    names: ParameterNames
    group: Callable[[], dist.ProcessGroup]
    loss_scale: Callable[[], LossScale] | None = None
    shards: Callable[[], dist.ProcessGroup] | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return None if self.shards is None else self.shards()


class RankState(NamedTuple):
    """Describes the state of one rank in a comparison, as numbers that fit into int64.

    Attributes:
        configuration: hash of what determines the collectives: hook, options, dtype, shapes.
        local_missing: 1 if this rank has no local tensors (residuals) although it should.
        nonce: a random number; all ranks take that of rank 0.
        kernels: `KernelSupport.key`.
        local: hash of the names of the parameters that have local tensors.
    """

    step: int
    configuration: int
    local_missing: int
    nonce: int
    kernels: int
    local: int


class Consensus:
    """Holds what must be equal on all ranks of a session, and compares it across the ranks.

    Attributes:
        compressor: the current compressor; a load or a listener may replace it
            (`replace_compressor`).
        reduction: whether each rank compresses all of a bucket, or a share of it.
        choice: the kernel of all ranks; None before `attach` or the first backward pass.
        nonce: a random number, equal on all ranks; None before the first backward pass.
        compares_sends: whether the ranks compare their Sends for a bucket that `is_new`: for
            user-defined compressors.
        agreement: None until the ranks have compared their states, and again after a load or a
            change of compressor.
    """

    def __init__(
        self, compressor: Compressor[Any], binding: Binding, held: HeldState, counters: Counters
    ) -> None:
        self.compressor = compressor
        self.compares_sends = _is_user_defined(compressor)
        self._reduction: FlatReduction = FLAT
        self.choice: KernelChoice | None = None
        self.nonce: int | None = None
        self._held = held
        self._counters = counters
        self.agreement: Agreement | None = None
        self._seen: set[tuple[int, ...]] = set()  # the parameters of each bucket
        self.bind(binding)

    @property
    def compared(self) -> bool:
        """Whether the ranks have compared their states since the latest load or new compressor.

        If so, all ranks have residuals of the same parameters, unless they form nodes.
        """
        return self.agreement is not None

    @property
    def reduction(self) -> FlatReduction:
        return self.reduction_of(self.compressor)

    @reduction.setter
    def reduction(self, reduction: FlatReduction) -> None:
        self._reduction = reduction

    def reduction_of(self, compressor: Compressor[Any]) -> FlatReduction:
        return self._reduction if compressor.between_nodes else FLAT

    def bind(self, binding: Binding) -> None:
        self.binding = binding
        self.buckets = KnownBuckets(self._held.state, binding.names)

    def compute_with(self, choice: KernelChoice) -> None:
        self.choice = choice
        if self.compressor.native != choice.native:
            self.compressor.native = choice.native
            self.buckets.clear()  # their workspaces were made for the other kernel

    def replace_compressor(self, compressor: Compressor[Any]) -> None:
        """Use `compressor` from now on. Call this after a load, too.

        At the next backward pass the ranks compare their states again, and the loaded state is
        checked and refitted.
        """
        self.compressor = compressor
        self.compares_sends = _is_user_defined(compressor)
        if self.choice is not None:
            compressor.native = self.choice.native
        self.agreement = None
        self._held.commit_failed = False
        self.buckets.clear()
        self._seen.clear()

    def is_new(self, bucket: Bucket) -> bool:
        """Record the layout of `bucket`; return whether it is new since compression began."""
        layout = tuple(map(id, bucket.parameters))
        new = layout not in self._seen
        self._seen.add(layout)
        return new

    def reach(self, group: dist.ProcessGroup, flat: torch.Tensor) -> Agreement:
        """Compare the ranks' states, unless the latest comparison is still valid.

        All ranks of `group` must call this before each backward pass. `flat`: the first bucket.

        Raises:
            HookRunError: on all ranks, if the steps or the configurations differ, or if some ranks
                cannot run the hook; the message names the ranks.
            HookConfigError: no rank can run the hook.
        """
        return self.agreement or self._compare(group, flat)

    def _compare(self, group: dist.ProcessGroup, flat: torch.Tensor) -> Agreement:
        """Compare step and configuration over the ranks of `group`, and the step over all shards.

        Choose a kernel if none was chosen. If one rank lacks its local tensors, drop the local
        tensors on all ranks.
        """
        state = self._held.state
        shard_group = self.binding.shard_group
        self._held.settle()
        # A load has allocated these tensors on the stream of its own thread.
        keep_for_current_stream(
            tensor for entries in state.entries.values() for tensor in entries.values()
        )
        agree = functools.partial(self._agree, group, flat)
        (rows, choice), steps = on_all_shards(
            agree, [state.step], shard_group, flat.device, HookRunError
        )
        _check_steps([step for (step,) in steps], " of the sharding group")
        self.buckets.is_logging_rank = is_logging_rank(group, shard_group)
        if self.choice is None:
            self._begin_with(choice)
        if self.nonce is None:
            self.nonce = rows[0].nonce
        self._align_local(rows, group)
        self.agreement = Agreement(self.compressor.start_step, self.compressor.needs_exact_step)
        return self.agreement

    def _agree(
        self, group: dist.ProcessGroup, flat: torch.Tensor
    ) -> tuple[list[RankState], KernelChoice]:
        """Gather the states of all ranks, check what must be equal, and choose the kernel."""
        what = "the comparison of the ranks' state (load on every rank, or on none)"
        support = self._kernel_support(flat)
        own_state = torch.tensor(self._own_state(support), dtype=torch.int64, device=flat.device)
        table = gather_rows(own_state, group, self._counters, what).tolist()
        rows = [RankState(*row) for row in table]
        _check_steps([row.step for row in rows])
        _check_configurations([row.configuration for row in rows])
        keys = [row.kernels for row in rows]
        return rows, agreed_choice(support, keys, group, flat.device, HookRunError)

    def _kernel_support(self, flat: torch.Tensor) -> KernelSupport:
        if self.choice is None:
            return KernelSupport.of(self.compressor, flat.device, [flat.dtype])
        return KernelSupport(self.choice.name)

    def _own_state(self, support: KernelSupport) -> RankState:
        compressor = self.compressor
        state = self._held.state
        parameters = self.binding.names.named_parameters()
        shapes = sorted((name, tuple(parameter.shape)) for name, parameter in parameters.items())
        options = (compressor.config, compressor.notes)
        local = sorted(name for key in state.local for name in state[key])
        return RankState(
            step=state.step,
            configuration=agreement_key(compressor.name, options, compressor.wire_dtype, shapes),
            local_missing=int(state.local_missing),
            nonce=secrets.randbits(62),
            kernels=support.key,
            local=agreement_key(*local),
        )

    def _begin_with(self, choice: KernelChoice) -> None:
        self.compute_with(choice)
        if self.buckets.is_logging_rank:
            for warning in choice.warnings(self.compressor.display_name):
                logger.warning("%s", warning)

    def _align_local(self, rows: list[RankState], group: dist.ProcessGroup) -> None:
        """Give all ranks local tensors (residuals) of the same parameters, or none."""
        state = self._held.state
        if any(row.local_missing for row in rows):
            state.drop_local()
            if self.buckets.is_logging_rank and not state.missing_was_said:
                logger.warning(
                    "%s: the residual of at least one rank is missing or belongs to another rank;"
                    " all ranks start from residuals of zero. Step and Q are kept.",
                    self.compressor.display_name,
                )
        if self.reduction.nodes is not None or len({row.local for row in rows}) > 1:
            parameters = self.binding.names.named_parameters()
            self.reduction.redistribute_residuals(state, parameters, group)


def _is_user_defined(compressor: Compressor[Any]) -> bool:
    return not type(compressor).__module__.startswith("commhooks.")


def _check_configurations(configurations: list[int]) -> None:
    if len(set(configurations)) > 1:
        ranks_with: dict[int, list[int]] = {}
        for rank, configuration in enumerate(configurations):
            ranks_with.setdefault(configuration, []).append(rank)
        groups = [f"ranks [{listed(ranks)}]" for ranks in ranks_with.values()]
        raise HookRunError(
            f"the ranks run different hooks, options or models: {' differ from '.join(groups)}."
            " Give every rank the same hook, options, wrapper and model"
        )


def _check_steps(steps: list[int], of: str = "") -> None:
    if len(set(steps)) > 1:
        by_rank = listed(f"rank {rank}: {step}" for rank, step in enumerate(steps))
        raise HookRunError(
            f"the ranks are at different steps of the hook: {by_rank}{of}. Load the same checkpoint"
            " on every rank before the first backward pass, or on none"
        )


class SendComparison:
    """Compares each Send of a backward pass across `group`, in a small all-gather before it starts.

    gloo ends the process if the ranks of a collective send different sizes, and a rank that sends
    more often than the others waits for ever. Built-in compressors follow their plans; a user's
    compressor may have a bug. If the ranks differ, none of them issues another collective of the
    exchange, and `end` raises the error. Until then they take part in the rest of the pass, because
    ranks of their node, or with other shards, may wait.
    """

    def __init__(
        self,
        consensus: "Consensus",
        group: dist.ProcessGroup,
        device: torch.device,
        counters: Counters | None,
    ) -> None:
        self._group = group
        self._device = device
        self._counters = counters
        self._name = consensus.compressor.name
        # The ranks of these groups exchange something else, and must fail together with the ranks
        # of `group`.
        self._others: list[dist.ProcessGroup] = []
        if consensus.reduction.nodes is not None:
            self._others.append(consensus.reduction.nodes.intra_node)
        if consensus.binding.shards is not None:
            self._others.append(consensus.binding.shards())
        self._sends_of: collections.Counter[int] = collections.Counter()
        self._problem = ""

    def issue(self, bucket: int, start: Callable[[Send], Started], send: Send) -> Started | None:
        # Only the engine sends inside a node, so there is nothing to compare.
        return start(send) if send.over == "intra_node" or self.agree(bucket, send) else None

    def agree(self, bucket: int, send: Send) -> bool:
        self._sends_of[bucket] += 1
        number = f"Send {self._sends_of[bucket]}"
        label = f" ({send.what})" if send.what else ""
        # splits may differ
        size = "splits" if send.splits is not None else f"shape {tuple(send.tensor.shape)}"
        sparse = ", sparse" if send.tensor.is_sparse else ""
        dtype = dtype_name(send.tensor.dtype)
        rest = f" of bucket {bucket}: op={send.op!r}, {size}, {dtype}{sparse}, last={send.last}"
        return self._compare(number, label, rest)

    def end(self) -> None:
        """Compare the number of Sends.

        Raises HookRunError on all ranks if anything has differed in this pass.
        """
        self._compare("no further Send", "", "")
        for group in self._others:
            failed = torch.tensor([bool(self._problem)], dtype=torch.int64, device=self._device)
            if gather_rows(failed, group, self._counters, _WHAT).any():
                problems = gather_texts(self._problem, group, self._device, _WHAT)
                self._problem = next(filter(None, problems))
        if self._problem:
            raise HookRunError(self._problem)

    def _compare(self, number: str, label: str, rest: str) -> bool:
        if self._problem:
            return False
        # `label` may differ: it only appears in messages.
        key = torch.tensor([agreement_key(number, rest)], dtype=torch.int64, device=self._device)
        keys = gather_rows(key, self._group, self._counters, _WHAT).flatten().tolist()
        if len(set(keys)) > 1:
            texts = gather_texts(number + label + rest, self._group, self._device, _WHAT)
            self._problem = self._differences(texts)
        return not self._problem

    def _differences(self, texts: list[str]) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank, text in zip(dist.get_process_group_ranks(self._group), texts, strict=True):
            ranks_of.setdefault(text, []).append(rank)
        shown = [
            f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {text}"
            for text, ranks in ranks_of.items()
        ]
        more = f"; and {len(shown) - _SHOWN} others" if len(shown) > _SHOWN else ""
        return (
            f"the exchange of {self._name} does not send the same on all ranks."
            f" {'; '.join(shown[:_SHOWN])}{more}. Every rank must yield the same Sends: their"
            " number, and op, shape, dtype and last of each, must follow from the plan and the"
            " options, not from values or from the rank"
        )
