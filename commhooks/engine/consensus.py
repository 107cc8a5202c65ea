"""Compare the ranks at the start, after a load and after a change of the compressor, before a
bucket is reduced.

The step number and the options determine which collectives a step runs: ranks that disagree on them
would pair collectives of different sizes, so that gloo aborts and NCCL hangs. Error feedback needs
the residuals of all ranks, or none.
"""

import collections
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
    """Holds what is valid from one comparison of the ranks to the next. Compression begins after
    `start` committed steps.
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
        """Whether the ranks have compared their states since the latest load or change of the
        compressor. If so, all ranks have residuals of the same parameters, unless they form nodes.
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
        """Use `compressor` from now on. Call this after a load, too: at the next backward pass the
        ranks compare their states again, and the loaded state is checked and refitted.
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
        """Return whether the layout of `bucket` occurs for the first time since compression began,
        and record it.
        """
        layout = tuple(map(id, bucket.parameters))
        new = layout not in self._seen
        self._seen.add(layout)
        return new

    def reach(self, group: dist.ProcessGroup, flat: torch.Tensor) -> Agreement:
        """Compare the ranks' states unless that has happened since the start, a load or a change of
        the compressor. All ranks of `group` must call this before each backward pass. `flat`: the
        first bucket.

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
        compressor, state = self.compressor, self._held.state
        names, shard_group = self.binding.names.named_parameters(), self.binding.shard_group
        self._held.settle()
        # A load has allocated these tensors on the stream of its own thread.
        keep_for_current_stream(
            tensor for entries in state.entries.values() for tensor in entries.values()
        )
        shapes = sorted((name, tuple(parameter.shape)) for name, parameter in names.items())
        in_force = compressor.config, compressor.notes
        configuration = agreement_key(compressor.name, in_force, compressor.wire_dtype, shapes)
        chosen, device = self.choice, flat.device
        if chosen is None:
            support = KernelSupport.of(compressor, device, [flat.dtype])
        else:
            support = KernelSupport(chosen.name)
        local = agreement_key(*sorted(name for key in state.local for name in state[key]))
        numbers = [
            state.step,
            configuration,
            int(state.local_missing),
            secrets.randbits(62),
            support.key,
            local,
        ]

        def agree() -> tuple[list[list[int]], KernelChoice]:
            what = "the comparison of the ranks' state (load on every rank, or on none)"
            own = torch.tensor(numbers, dtype=torch.int64, device=device)
            table: list[list[int]] = gather_rows(own, group, self._counters, what).tolist()
            _check_steps([row[0] for row in table])
            _check_configurations([row[1] for row in table])
            return table, agreed_choice(
                support, [row[4] for row in table], group, device, HookRunError
            )

        (table, choice), steps = on_all_shards(
            agree, [state.step], shard_group, device, HookRunError
        )
        _check_steps([row[0] for row in steps], " of the sharding group")
        self.buckets.is_logging_rank = logs = is_logging_rank(group, shard_group)
        if chosen is None:
            self.compute_with(choice)
            for warning in choice.warnings(compressor.display_name) if logs else ():
                logger.warning("%s", warning)
        if self.nonce is None:
            self.nonce = table[0][3]
        if any(row[2] for row in table):
            state.drop_local()
            if logs and not state.missing_was_said:
                logger.warning(
                    "%s: the residual of at least one rank is missing or belongs to another rank;"
                    " all ranks start from residuals of zero. Step and Q are kept.",
                    compressor.display_name,
                )
        if self.reduction.nodes is not None or len({row[5] for row in table}) > 1:
            self.reduction.redistribute_residuals(state, names, group)
        self.agreement = Agreement(compressor.start_step, compressor.needs_exact_step)
        return self.agreement


def _is_user_defined(compressor: Compressor[Any]) -> bool:
    return not type(compressor).__module__.startswith("commhooks.")


def _check_configurations(configurations: list[int]) -> None:
    if len(set(configurations)) > 1:
        groups = sorted(
            {
                tuple(r for r, c in enumerate(configurations) if c == value)
                for value in configurations
            }
        )
        raise HookRunError(
            "the ranks run different hooks, options or models: "
            + " differ from ".join(f"ranks [{listed(ranks)}]" for ranks in groups)
            + ". Give every rank the same hook, options, wrapper and model"
        )


def _check_steps(steps: list[int], of: str = "") -> None:
    if len(set(steps)) > 1:
        by_rank = listed(f"rank {rank}: {step}" for rank, step in enumerate(steps))
        raise HookRunError(
            f"the ranks are at different steps of the hook: {by_rank}{of}. Load the same checkpoint"
            " on every rank before the first backward pass, or on none"
        )


class SendComparison:
    """Compares each Send of one backward pass across `group` in a small all-gather, before the Send
    is issued.

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
        self._group, self._device, self._counters = group, device, counters
        self._name = consensus.compressor.name
        # The ranks of these groups exchange something else, and must fail together with the ranks
        # of `group`.
        nodes, shards = consensus.reduction.nodes, consensus.binding.shard_group
        node = None if nodes is None else nodes.intra_node
        self._others = [each for each in (node, shards) if each is not None]
        self._sends_of: collections.Counter[int] = collections.Counter()
        self._problem = ""

    def issue(self, bucket: int, start: Callable[[Send], Started], send: Send) -> Started | None:
        # Only the engine sends inside a node, so there is nothing to compare.
        return start(send) if send.over == "intra_node" or self.agree(bucket, send) else None

    def agree(self, bucket: int, send: Send) -> bool:
        self._sends_of[bucket] += 1
        # splits may differ
        what = "splits" if send.splits is not None else f"shape {tuple(send.tensor.shape)}"
        dtype = dtype_name(send.tensor.dtype)
        tensor = (
            f"op={send.op!r}, {what}, {dtype}{', sparse' if send.tensor.is_sparse else ''},"
            f" last={send.last}"
        )
        number = f"Send {self._sends_of[bucket]}"
        return self._compare(
            number, f" ({send.what})" if send.what else "", f" of bucket {bucket}: {tensor}"
        )

    def end(self) -> None:
        """Compare the number of Sends. Raises HookRunError on all ranks if anything has differed in
        this pass.
        """
        self._compare("no further Send", "", "")
        for group in self._others:
            failed = torch.tensor([bool(self._problem)], dtype=torch.int64, device=self._device)
            if gather_rows(failed, group, self._counters, _WHAT).any():
                self._problem = next(
                    filter(None, gather_texts(self._problem, group, self._device, _WHAT))
                )
        if self._problem:
            raise HookRunError(self._problem)

    def _compare(self, number: str, label: str, rest: str) -> bool:
        if self._problem:
            return False
        # `label` may differ: it only appears in messages.
        own = torch.tensor([agreement_key(number, rest)], dtype=torch.int64, device=self._device)
        keys = gather_rows(own, self._group, self._counters, _WHAT).flatten().tolist()
        if len(set(keys)) > 1:
            self._problem = self._differences(
                gather_texts(number + label + rest, self._group, self._device, _WHAT)
            )
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
