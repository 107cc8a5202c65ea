"""One exchange of weights, from the copy of the weights to the commit, in the order of its
methods: `begin`, `finite`, `commit`, `write_weights`. There are three ways to call them
(`outer_steps.py`):

- **at once**, while the training waits: an exchange for each buffer, of which two are under way at
  a time;
- **behind the training** (`delay`): `begin_behind`, and the rest some passes later;
- **prepared**: `begin` or `begin_behind`, and `finite`, and the rest only after all machines have
  confirmed.

Anchor, momentum and weights are written by `commit` and `write_weights` only (among machines, on
ranks that do not exchange, by `OuterSteps.commit_prepared`), so an exchange may be dropped before,
and repeated with the weights that it has sent. That is why an exchange that is prepared or behind
the training needs memory for all of its buffers (behind the training twice, with the weights as
they were sent), and not for two at a time: all of its buffers are committed or none, so what has
arrived must be kept until the last one has. At once it may be less, because whether all ranks can
commit is known from the first buffer on."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from commhooks.comm.counters import Clocks
from commhooks.engine.backward_pass import RunningExchange, finish_sends
from commhooks.engine.session import ABANDONED_LIMIT_S
from commhooks.engine.streams import in_background
from commhooks.gradients import precision
from commhooks.gradients.precision import keep_for_current_stream
from commhooks.local_steps.flat_weights import packed, write_back
from commhooks.local_steps.outer_step import OuterStepWorkspace

Start = Callable[[OuterStepWorkspace, torch.Tensor], RunningExchange]


class OuterExchange:
    """Exchanges some buffers of weights with the other ranks, which must call each method in the
    same order.

    Args:
        buffers: all on one device; may be empty, for a fragment without weights here.
        start: makes the exchange of a buffer from its workspace and a copy of its weights, and
            sends nothing yet.
        clocks: measures the time in this object.
        sent: copies of the weights of each buffer, to send instead of the present weights.
        exchanges: whether this rank exchanges; otherwise it gets the new anchor from one that does.

    Attributes:
        sent: the weights as they were sent, if the training goes on meanwhile.
        results: of each buffer the new anchor, after the commit."""

    def __init__(
        self,
        buffers: Sequence[OuterStepWorkspace],
        start: Start,
        clocks: Clocks,
        *,
        sent: Sequence[torch.Tensor] = (),
        exchanges: bool = True,
    ) -> None:
        self.buffers = buffers
        self.device = buffers[0].layout.device if buffers else torch.device("cpu")
        self.exchanges = exchanges
        self.running: list[RunningExchange] = []
        self.results: list[torch.Tensor] = []
        self.sent = list(sent)
        self._start, self._clocks = start, clocks
        self._finite: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, good: torch.Tensor | None = None) -> None:
        """Copy the weights, and send the differences to the anchor. `good`: see `packed`."""
        with self._computing():
            self._copy(good)
            self._send()

    def begin_behind(self, before: Callable[[], None]) -> None:
        """Copy the weights, and exchange the differences while the training goes on: on an
        accelerator on the background stream, for which the host does not wait; on the CPU in a
        thread, which waits for the network. `before` runs on the background stream first."""
        self._copy()
        if not self.exchanges:
            self.sent = [packed(work.layout) for work in self.buffers]
            return
        self.sent = [buffer.flat.clone() for buffer in self.running]
        if precision.has_streams(self.device):
            with in_background(self.device, after_current=True):
                keep_for_current_stream([buffer.flat for buffer in self.running])
                before()
                self._exchange()
            return
        self._thread = threading.Thread(
            target=self._exchange_and_keep_errors, name="commhooks outer step", daemon=True
        )
        self._thread.start()
        # This also joins the thread at exit: the process would abort if it stopped a thread within
        # a collective.
        weakref.finalize(self, _join, self._thread, ABANDONED_LIMIT_S)

    def has_arrived(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for what runs behind the training, and return whether it has ended,
        with an error or without. Always true if it does not run in a thread."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def finite(self) -> torch.Tensor:
        """Wait for everything to arrive, and return whether it is finite (0-dim bool tensor).
        Behind the training raise the error of the thread; on an accelerator call this on the
        background stream."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            # Do not keep it: its traceback refers to this object, and to the connections.
            error, self._error = self._error, None
            raise error
        if self._finite is None:
            with self._computing():
                self._receive()
        assert self._finite is not None
        return self._finite

    def commit(self, verdict: torch.Tensor | bool) -> None:
        """Write the new anchor and momentum, or if the verdict is false leave them as they are.
        Call this in `HeldState.committing`."""
        with self._computing():
            for buffer in self.running:
                buffer.advance(verdict)
            self.results = [buffer.result for buffer in self.running]

    def write_weights(self, *, keep_training: bool = False) -> None:
        """Set the weights to the anchor. With `keep_training` add what the training has changed
        since they were sent."""
        with self._computing():
            for place, (work, flat) in enumerate(zip(self.buffers, self.results, strict=True)):
                if keep_training:  # weights = anchor + (weights now - weights sent)
                    flat.sub_(self.sent[place]).add_(packed(work.layout))
                write_back(work.layout, flat)

    def wait(self, limit_s: float | None) -> None:
        """Wait for an exchange that is dropped, which may still write into its buffers; on an
        accelerator the memory is kept for the stream, and nothing needs to wait."""
        if self._thread is not None:
            _join(self._thread, limit_s)

    def _copy(self, good: torch.Tensor | None = None) -> None:
        if not self.exchanges:
            return
        copies = (
            [sent.clone() for sent in self.sent]
            if self.sent
            else [packed(work.layout, good) for work in self.buffers]
        )
        self.running = [
            self._start(work, copy) for work, copy in zip(self.buffers, copies, strict=True)
        ]

    def _send(self) -> None:
        for buffer in self.running:
            buffer.advance()

    def _receive(self) -> None:
        finish_sends(self.running)
        of_buffers = [buffer.finite for buffer in self.running]
        self._finite = (
            torch.stack(of_buffers).all()
            if of_buffers
            else torch.ones((), dtype=torch.bool, device=self.device)
        )

    def _exchange(self) -> None:
        with self._computing():
            self._send()
            self._receive()

    def _exchange_and_keep_errors(self) -> None:
        try:
            self._exchange()
        except BaseException as error:  # raised by `finite`
            self._error = error

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        # Leave the precision of products alone: it is a setting of the process, and the training
        # may be multiplying.
        with precision.full_precision(products=False), self._clocks.measure(self.device):
            yield


def _join(thread: threading.Thread, limit_s: float | None) -> None:
    if thread is not threading.current_thread():
        thread.join(limit_s)
