"""The order of things in a backward pass: which exchange when, over all buckets.

Collectives are issued from inside the hook call only, in bucket order, so that every rank issues the same sequence:
P of bucket k, then Q of bucket k - 1, and at the last bucket what is left. The call for bucket k returns while P of
bucket k travels. A step is a transaction: the learned state is written at the end, once all that arrived is known to be
finite, so that an abandoned backward pass leaves the last committed step behind.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from commhooks.comm.counters import Stats
from commhooks.engine.state import Memory
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.after_backward import run_after_backward
from commhooks.gradients.loss_scale import LossScale

logger = logging.getLogger(__name__)


class Exchange(Protocol):
    """One bucket on its way through one backward pass."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]

    def start(self) -> None: ...
    def advance(self) -> None: ...
    def finish(self) -> torch.Tensor: ...
    def commit(self, good: torch.Tensor | bool) -> None: ...


@dataclass
class Flight:
    """The buckets of one backward pass, in order."""

    compressing: bool
    residual_factor: LossScale
    """By this the loss scale has changed since the residuals were written."""
    loss_scale: LossScale
    step: int
    """Committed passes before this one, as far as the host knows."""
    rescaled: bool = False
    """The residuals have been brought to `loss_scale`."""
    exchanges: list[Exchange] = field(default_factory=list)
    last_index: int = -1
    """Of the bucket that came last; buckets come in order, so that a lower one begins another pass."""
    advanced: int = 0
    done: bool = False


class Pipeline:
    """Runs the exchanges of one registration. Holds nothing that is learned.

    Args:
        memory: the learned state; written at commit only.
        stats: counted here and in the exchanges.
        make_exchange: (bucket, flight) -> its exchange.
        begin: called at the first bucket of each pass with its device, before anything is sent; returns the flight.
        end: called after a commit, while the memory is still locked.
        abandon: called before `begin` where the pass before never came to its end, with all-reduces perhaps still
            writing into its buffers.
    """

    def __init__(
        self,
        memory: Memory,
        stats: Stats,
        begin: Callable[[dist.GradBucket], Flight],
        make_exchange: Callable[[dist.GradBucket, Flight], Exchange],
        end: Callable[[Flight], None],
        abandon: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._stats = stats
        self._begin = begin
        self._make_exchange = make_exchange
        self._end = end
        self._abandon = abandon
        self._open = False
        self._flight: Flight | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Verdicts that the host has not asked for yet: committed passes (on the device), passes, were they compressed?
        self._unsettled: tuple[torch.Tensor, int, bool] | None = None
        self.lock = threading.RLock()
        """Held while the learned state is written, and by whoever reads it from another thread."""
        self.committing = False
        """The learned state is being written: a signal handler finds it torn."""

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook call for one bucket. All ranks, in the same order."""
        buffer = bucket.buffer()
        try:
            with self._codec_stream(buffer), precision.exact(buffer.device):
                # Whatever is left of a pass that ended in an exception was never committed: forget it.
                if self._flight is None or self._flight.done or bucket.index() <= self._flight.last_index:
                    if self._open:
                        self._abandon()
                    self._flight = self._begin(bucket)
                    self._open = True
                    self._stats.begin_pass()
                flight = self._flight
                flight.last_index = bucket.index()
                with self._stats.clocks.codec(buffer.device):
                    if not bucket.is_last():
                        self._drain_after_backward(flight)
                    exchange = self._make_exchange(bucket, flight)
                    flight.exchanges.append(exchange)
                    exchange.start()
                    self._advance(flight, len(flight.exchanges) - 1)
                    if bucket.is_last():
                        self._drain(flight)
                return exchange.future
        except BaseException:
            self._flight = None
            raise

    @property
    def unsettled_passes(self) -> int:
        """Backward passes of which the device has not been asked yet whether they were committed."""
        return self._unsettled[1] if self._unsettled else 0

    def settle(self) -> None:
        """Bring `memory.step` up to date. Waits for an accelerator if it has verdicts that nobody asked for yet. What
        the caller's stream reads of the memory from now on, it reads after the codec's stream has written it."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        with self.lock:
            while (verdicts := self._unsettled) is not None:
                committed, loss_scale = int(verdicts[0].item()), float(self._memory.loss_scale)
                # While this thread waited for the device, a signal handler may have come and done all of it.
                if self._unsettled is verdicts:
                    self._count_settled(committed, loss_scale, *verdicts[1:])

    def _count_settled(self, committed: int, loss_scale: float, passes: int, compressed: bool) -> None:
        was, self.committing = self.committing, True
        try:
            self._unsettled = None
            self._memory.step += committed
            self._memory.nonfinite_steps += passes - committed
            self._memory.loss_scale = loss_scale
            self._stats.compressed_steps += committed if compressed else 0
            self._stats.nonfinite_steps += passes - committed
        finally:
            self.committing = was

    def _advance(self, flight: Flight, upto: int) -> None:
        while flight.advanced < upto:
            flight.exchanges[flight.advanced].advance()
            flight.advanced += 1

    def _drain(self, flight: Flight) -> None:
        self._advance(flight, len(flight.exchanges))
        verdicts = [exchange.finish() for exchange in flight.exchanges]
        good = torch.stack(verdicts).all()
        on_host = precision.host_may_look(good.device)
        verdict: torch.Tensor | bool = bool(good) if on_host else good
        with self.lock:
            self.committing = True
            if flight.compressing:
                self._memory.residuals_shared = False
            try:
                for exchange in flight.exchanges:
                    exchange.commit(verdict)
            except BaseException:
                # Some residuals are of this step and some of the one before: none of them may be saved.
                self._memory.residuals.clear()
                self._memory.residual_missing = True
                self.committing = False
                raise
            if verdict is not False:
                self._memory.loss_scale = flight.loss_scale
                flight.rescaled = True
                # After a commit that failed half-way the residual began at zero; now it is whole again.
                self._memory.residual_missing = False
            count, passes = self._unsettled[:2] if self._unsettled else (torch.zeros((), dtype=torch.int64), 0)
            self._unsettled = (good + count, passes + 1, flight.compressing)
            if on_host:
                self.settle()
            self._end(flight)
            self.committing = False
        self._open = False
        flight.done = True
        for exchange in flight.exchanges:
            exchange.future.set_result(exchange.buffer)
        # DDP may be about to rebuild its buckets: nothing here keeps the old ones alive.
        flight.exchanges.clear()

    def _drain_after_backward(self, flight: Flight) -> None:
        """Where DDP skips the all-reduce of unused parameters, `is_last()` may never come: drain at the end of the
        backward pass then. DDP waits for the futures in a callback of the same kind, queued later."""

        def drain_if_open() -> None:
            if not flight.done and flight is self._flight:
                buffer = flight.exchanges[-1].buffer
                device, clocks = buffer.device, self._stats.clocks
                with self._codec_stream(buffer), precision.exact(device), clocks.codec(device):
                    self._drain(flight)

        run_after_backward(drain_if_open)

    @contextlib.contextmanager
    def _codec_stream(self, buffer: torch.Tensor):  # type: ignore[no-untyped-def]
        """A stream of our own on CUDA, so that waiting for the network does not stop the backward pass."""
        if buffer.device.type != "cuda":
            yield
            return
        stream = self._streams.get(buffer.device)
        if stream is None:
            stream = self._streams[buffer.device] = torch.cuda.Stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        if not buffer.is_sparse:
            buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            yield


def forbid_uneven_division(ddp_model: torch.nn.parallel.DistributedDataParallel) -> None:
    """`Join(divide_by_initial_world_size=False)` asks for the mean over the ranks still active; no hook learns that."""
    # Private (torch 2.13): set by DDP's join hook and told to nobody else.
    if getattr(ddp_model, "_divide_by_initial_world_size", True) is False:
        raise HookRunError(
            "a communication hook divides gradients by the world size; Join(divide_by_initial_world_size=False) asks "
            "for the number of active ranks instead. Use divide_by_initial_world_size=True, or no hook"
        )
