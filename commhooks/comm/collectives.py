"""Issue the collectives of hooks, count their bytes, and wait for them."""

import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from commhooks.comm.counters import Counters
from commhooks.comm.groups import CPU, TAG, backend_of, described_lost, lost_ranks
from commhooks.errors import CommHookError, HookRunError, listed, logger_of
from commhooks.gradients.layout import bytes_of
from commhooks.gradients.torch_private import sparse_values, timeout_of

logger = logger_of(__name__)

Op = Literal["sum", "max", "gather", "all_to_all"]
Scope = Literal["all", "intra_node", "inter_node"]
_NAMES = {"gather": "all-gather", "all_to_all": "all-to-all"}
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of the all-gather into one tensor, which torch 2.13 has renamed."""
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The name of the reduce-scatter from one tensor, likewise."""


@dataclass(eq=False, slots=True)
class Send:
    """Describes one collective over the ranks, which must all send the same shape and dtype.

    "sum" and "max" reduce `tensor` in place and return it. "gather" returns a new tensor of shape
    `(world_size, *shape)`. For "all_to_all", `tensor` has shape `(world_size, ...)`: row i goes to
    rank i, and row i of the result, a new tensor, came from rank i. With `splits`, tensors and
    results of "gather" and "all_to_all" are 1-D.
    """

    tensor: torch.Tensor
    _: KW_ONLY
    what: str = ""
    """Description in messages, e.g. "P"; the bucket and the step are added."""
    op: Op = "sum"
    last: bool = False
    """Whether this is the last collective of its exchange.

    The engine waits for it only after all buckets have been sent.
    """
    meanwhile: Callable[[], None] | None = None
    """Called when the collective has been issued, to compute while the network is busy.

    It must neither need the result nor touch `tensor`.
    """
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    """For parts of different sizes: the number of elements to each rank, and from each rank.

    With "gather" every rank gets all of `tensor`.
    """
    into: torch.Tensor | None = None
    """Memory for the result of "gather" and "all_to_all", in its shape; None: new memory."""
    over: Scope = "all"
    """Which ranks take part.

    The engine sets it if the ranks form nodes: "intra_node" for the ranks of this node,
    "inter_node" for the ranks with this local rank on all nodes.
    """
    reduces: bool = field(init=False)
    """Whether the result is `tensor` itself, reduced in place."""

    def __post_init__(self) -> None:
        if self.op not in get_args(Op):
            expected = ", ".join(map(repr, get_args(Op)))
            raise HookRunError(
                f"Send(op={self.op!r}); expected one of {expected}. For a mean, divide what is sent"
                " by step.world_size"
            )
        self.reduces = self.op in ("sum", "max")

    def counted_bytes(self, world_size: int) -> int:
        sent = sparse_values(self.tensor) if self.tensor.is_sparse else self.tensor
        size = sent.numel() * sent.element_size()
        if self.reduces:
            return size
        # The tensor with the parts of all ranks: `tensor` holds one part for "gather", one per rank
        # for "all_to_all".
        whole = size * world_size if self.op == "gather" else size
        return -(-whole // 2)


_AT_ONCE = timedelta(milliseconds=1)
"""A timeout for what should be there already; zero means the group's timeout (torch 2.13)."""


class MessageWork:
    """Holds the messages of one collective; `in_flight` keeps it alive until `wait` returns."""

    def __init__(self, in_flight: set["MessageWork"], limit: timedelta | None) -> None:
        self.works: list[dist.Work] = []
        self._in_flight = in_flight
        self._limit = limit
        in_flight.add(self)

    def post(self, work: dist.Work | None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait until the messages to this rank have arrived and its own have been sent.

        All of this together may take the timeout of the group, as with any other collective.
        """
        began = time.monotonic()
        for work in self.works:
            if self._limit is None:
                work.wait()
            else:
                work.wait(max(self._limit - timedelta(seconds=time.monotonic() - began), _AT_ONCE))
        self._in_flight.discard(self)


class PointToPoint:
    """Runs all-to-all and all-gather on gloo as messages between each pair of ranks.

    gloo sends a message only when the receiver has announced that it waits for it. gloo's own
    all-to-all and all-gather post the send first, so on a busy link the announcement queues behind
    the rank's own message. Here receives are posted first.

    torch's `Work` owns the memory of a message. If it is deleted too early, gloo no longer touches
    the memory, but the connection stays in the middle of the message, and every later message on it
    hangs. So each group holds its messages until `wait` has returned, even if their pass or
    exchange has failed. `forget_abandoned` and the end of the group release them.
    """

    _IN_FLIGHT: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[MessageWork]]" = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    @classmethod
    def in_flight(cls, group: dist.ProcessGroup) -> set[MessageWork]:
        return cls._IN_FLIGHT.setdefault(group, set())

    @staticmethod
    def applies_to(group: dist.ProcessGroup, device: torch.device) -> bool:
        return device.type == "cpu" and group.size() > 1 and backend_of(group, device) == "gloo"

    def exchange(
        self,
        sent: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> MessageWork:
        """Start to send `sent[i]` to rank i of `group`, and to receive `arriving[i]` from it.

        The tensors must be contiguous; empty tensors are not sent. All ranks of `group` must call
        this in the same order.
        """
        here, size = group.rank(), group.size()
        self._groups.add(group)
        peers = [(here - distance) % size for distance in range(1, size)]
        messages = MessageWork(self.in_flight(group), timeout_of(group, CPU))
        for peer in peers:
            if arriving[peer].numel():
                messages.post(dist.irecv(arriving[peer], group=group, group_src=peer, tag=TAG))
        for peer in reversed(peers):
            if sent[peer].numel():
                messages.post(dist.isend(sent[peer], group=group, group_dst=peer, tag=TAG))
        arriving[here].copy_(sent[here])
        return messages

    def forget_abandoned(self) -> None:
        """Release the messages of this session's groups for which nobody waits.

        Call this only after later messages have arrived on all ranks: messages between two ranks
        arrive in order.
        """
        for group in self._groups:
            self.in_flight(group).clear()


def resolve_group(process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise HookRunError("no process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclass(eq=False, slots=True)
class Pending:
    answer: torch.Tensor
    _work: dist.Work | MessageWork
    what: str
    _group: dist.ProcessGroup
    _counters: Counters | None

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return its result; see `Send`.

        On CUDA the current stream waits, not the host.
        """
        measured: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._counters is not None:
            measured = self._counters.clocks.measure(self.answer.device, waiting=True)
        try:
            with measured:
                self._work.wait()
        except RuntimeError as error:
            raise collective_error(self.what, self._group, error) from error
        return self.answer

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        assert not isinstance(self._work, MessageWork)  # messages have no future
        return self._work.get_future()

    def writes(self, buffer: torch.Tensor) -> bool:
        if buffer.is_sparse or self.answer.is_sparse:
            return self.answer is buffer
        return self.answer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def wait_for_abandoned(abandoned: Sequence[Pending], limit_s: float) -> None:
    """Wait for collectives whose results nobody needs, before their buffers are used again.

    With NCCL the current stream waits, with gloo the host, at most `limit_s` seconds in all, and
    then logs one warning. Raise nothing, because the caller already has an error to raise.
    """
    deadline = time.monotonic() + limit_s
    late = 0
    for pending in abandoned:
        with contextlib.suppress(RuntimeError):  # a failed collective writes nothing
            future = pending.future()
            # NCCL completes a future at once; `wait` then makes the current stream wait for an
            # event on the device.
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.002)
            if future.done():
                future.wait()
            else:
                late += 1
    if late:
        logger.warning(
            "%d all-reduces of an abandoned backward pass have not ended within %g s. They may"
            " still write into its gradient buckets: wrap the model in a new"
            " DistributedDataParallel before the next backward pass, or end the run.",
            late,
            limit_s,
        )


def start(
    send: Send,
    group: dist.ProcessGroup,
    counters: Counters | None,
    where: str = "",
    messages: PointToPoint | None = None,
) -> Pending:
    """Issue the collective `send`. All ranks of `group` must call this in the same order.

    Raises HookRunError if the backend refuses the collective. `where`: the bucket and the step, for
    messages. `messages`: the session's messages; None for a caller that needs the collective's
    future.
    """
    what = f"{send.what} of {where}" if send.what and where else send.what or where
    if counters is not None:
        counters.last_issued = what
    logger.debug("%s: %s", _NAMES.get(send.op, "all-reduce"), what)
    size = send.counted_bytes(group.size())
    if send.op == "all_to_all" and send.splits is None:
        _check_rows(send.tensor, group, what)
    work: dist.Work | MessageWork
    try:
        if send.reduces:
            op = dist.ReduceOp.MAX if send.op == "max" else dist.ReduceOp.SUM
            answer = send.tensor
            work = dist.all_reduce(answer, op=op, group=group, async_op=True)
        else:
            if messages is not None and not messages.applies_to(group, send.tensor.device):
                messages = None
            start_it = _start_gather if send.op == "gather" else _start_all_to_all
            answer, work = start_it(send, group, messages)
    except RuntimeError as error:
        raise collective_error(what, group, error) from error
    if counters is not None and send.over != "intra_node":
        counters.sent(size)
    elif counters is not None:
        counters.bytes_inside_nodes += size
    return Pending(answer, work, what, group, counters)


def _start_gather(
    send: Send, group: dist.ProcessGroup, messages: PointToPoint | None
) -> tuple[torch.Tensor, dist.Work | MessageWork]:
    tensor = send.tensor.contiguous()
    if send.splits is None:
        answer = send.into
        if answer is None:
            answer = tensor.new_empty((group.size(), *tensor.shape))
        if messages is None:
            return answer, _gather_equal(tensor, answer, group, async_op=True)
        parts = answer.unbind(0)
    else:
        sizes = list(send.splits[1])
        answer = tensor.new_empty(sum(sizes)) if send.into is None else send.into
        parts = answer.split(sizes)
        if messages is None:
            return answer, _gather_different(tensor, parts, group)
    return answer, messages.exchange([tensor] * group.size(), parts, group)


def _start_all_to_all(
    send: Send, group: dist.ProcessGroup, messages: PointToPoint | None
) -> tuple[torch.Tensor, dist.Work | MessageWork]:
    sent = arriving = None
    if send.splits is None:
        answer = send.into
        if answer is None:
            answer = torch.empty_like(send.tensor, memory_format=torch.contiguous_format)
    else:
        sent, arriving = map(list, send.splits)
        answer = send.tensor.new_empty(sum(arriving)) if send.into is None else send.into
    tensor = send.tensor.contiguous()
    if messages is not None and send.splits is None:
        return answer, messages.exchange(tensor.unbind(0), answer.unbind(0), group)
    work: dist.Work = dist.all_to_all_single(
        answer, tensor, arriving, sent, group=group, async_op=True
    )
    return answer, work


def _gather_equal(
    tensor: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> Any:
    # Returns torch's work, or None without `async_op`. `tensor` is contiguous.
    if type(group) is dist.ProcessGroup:
        gather = getattr(dist, ALL_GATHER)
        return gather(rows.view(-1), tensor.view(-1), group=group, async_op=async_op)
    # torchft's groups have no all-gather into one tensor.
    return dist.all_gather(list(rows.unbind(0)), tensor, group=group, async_op=async_op)


def _gather_different(
    tensor: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work | MessageWork:
    if backend_of(group, tensor.device) != "gloo":
        work: dist.Work = dist.all_gather(list(parts), tensor, group=group, async_op=True)
        return work
    # gloo only gathers equal sizes.
    broadcasts = MessageWork(set(), timeout_of(group, tensor.device))
    parts[group.rank()].copy_(tensor)
    for rank, part in enumerate(parts):
        if part.numel():
            broadcasts.post(dist.broadcast(part, group=group, group_src=rank, async_op=True))
    return broadcasts


def _check_rows(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    if tensor.dim() == 0 or len(tensor) != group.size():
        raise HookRunError(
            f"all-to-all of {what}: a tensor of shape {tuple(tensor.shape)} does not have one row"
            f" for each of {group.size()} ranks"
        )


def gather_rows(
    row: torch.Tensor, group: dist.ProcessGroup, counters: Counters | None, what: str
) -> torch.Tensor:
    """Gather the small tensor `row` from every rank, one row per rank.

    All ranks of `group` must call this, with equal shapes and dtypes.
    """
    row = row.contiguous()
    rows = torch.empty((group.size(), *row.shape), dtype=row.dtype, device=row.device)
    try:
        _gather_equal(row, rows, group, async_op=False)
    except RuntimeError as error:
        raise collective_error(what, group, error) from error
    if counters is not None:
        counters.handshakes += 1
    return rows


def gather_bytes(
    content: bytes, group: dist.ProcessGroup, device: torch.device, what: str
) -> list[bytes]:
    """Gather `content` of every rank, as `gather_rows` does; the lengths may differ."""
    length = torch.tensor([len(content)], device=device)
    lengths = gather_rows(length, group, None, what).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = gather_rows(padded.to(device), group, None, what).cpu()
    return [bytes_of(row[:numel]) for row, numel in zip(rows, lengths, strict=True)]


def broadcast_first(
    tensor: torch.Tensor, group: dist.ProcessGroup, counters: Counters | None, what: str
) -> None:
    """Broadcast `tensor`, contiguous, from rank 0 of `group`.

    All ranks must call this, with equal shapes and dtypes. Counted as an all-reduce that puts as
    many bytes on the network: half of the tensor's bytes.
    """
    try:
        dist.broadcast(tensor, group=group, group_src=0)
    except RuntimeError as error:
        raise collective_error(what, group, error) from error
    if counters is not None:
        counters.sent(-(-tensor.nbytes // 2))


def gather_texts(text: str, group: dist.ProcessGroup, device: torch.device, what: str) -> list[str]:
    return [content.decode() for content in gather_bytes(text.encode(), group, device, what)]


_COLUMNS = 1021


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a checksum of the bits of `tensor` and their order, equal in all processes.

    The result is a 0-dim int64 tensor on the same device. Tensors that differ in exactly one
    element have different checksums.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    by_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(by_width[tensor.element_size()])
    whole = bits.numel() // _COLUMNS * _COLUMNS
    columns = bits[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[whole:]
    columns[: rest.numel()] += rest
    # Odd factors are invertible modulo 2**64, so a difference in one column always changes the
    # result.
    places = torch.arange(_COLUMNS, dtype=torch.int64, device=tensor.device)
    factors = (places * 0x9E3779B97F4A7C2 + 1) | 1
    return (columns * factors).sum()


def agreement_key(*parts: object) -> int:
    """Hash the `repr` of `parts`, so that ranks can compare them, to a number below 2**62."""
    digest = hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def collective_error(what: str, group: dist.ProcessGroup, error: RuntimeError) -> HookRunError:
    """Create the error for a collective that has failed here.

    Finding the ranks that have ended or hang takes up to a few seconds (`lost_ranks`).
    """
    lost = lost_ranks(group, error)
    if lost:
        why = f"{described_lost(lost)}; look at the output there"
    else:
        why = (
            "another rank has probably ended, hangs, or sends something else; look at the output of"
            " the other ranks"
        )
    place = f"rank {group.rank()} of {group.size()}"
    if dist.is_initialized() and group.size() < dist.get_world_size():
        place = f"rank {dist.get_rank()} of {dist.get_world_size()} ({place} in its group)"
    return HookRunError(
        f"{place}: the exchange of {what} failed: {why}. The backend reports: {error}"
    )


def new_future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """Create a future for a tensor on `device`.

    Without `devices` a future would accept a tensor on an accelerator, but its waiters would not
    synchronise with the stream and would read too early.
    """
    return torch.futures.Future(devices=[] if device.type == "cpu" else [device])


T = TypeVar("T")


def good_on_all(good: torch.Tensor, group: dist.ProcessGroup, whose: str) -> torch.Tensor:
    """Return whether `good` (0-dim bool tensor) is true on all ranks of `group`.

    These are the shards of a replica or the ranks of a node; all of them must call this. The host
    does not wait for an accelerator. The bytes are not counted.
    """
    bad = (~good).to(torch.int32).view(1)
    bad_somewhere = start(Send(bad, what=f"the verdict of {whose}", op="max"), group, None).wait()
    return bad_somewhere[0] == 0


def on_all_shards(
    work: Callable[[], T],
    numbers: list[int],
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
    otherwise: type[CommHookError],
) -> tuple[T, list[list[int]]]:
    """Run `work` on all ranks of `shard_group`, so that all of them succeed or all raise.

    All must call this. `shard_group`: None if the model is not sharded. Returns the result of
    `work` on this rank, and the `numbers` of all ranks. If `work` raises CommHookError on another
    rank, this rank raises `otherwise`.

    The ranks with the same shard determine on their own whether they can attach and which step they
    have reached. Here these replicate groups exchange the results.
    """
    if shard_group is None:
        return work(), [numbers]
    what = "the comparison of the shards (do the same on every rank, or on none)"
    result: list[T] = []
    failure: CommHookError | None = None
    try:
        result.append(work())
    except CommHookError as error:
        failure = error
    row = torch.tensor([int(failure is not None), *numbers], dtype=torch.int64, device=device)
    table = gather_rows(row, shard_group, None, what).tolist()
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(table) if row[0]]
    if failed:
        raise otherwise(
            "the ranks that hold other shards of the model have failed: "
            f"ranks [{listed(failed)}] of the sharding group. Look at their errors"
        )
    return result[0], [row[1:] for row in table]
