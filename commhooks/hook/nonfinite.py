"""Warn once about averaged gradients that are not finite, if no GradScaler skips the step."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_texts
from commhooks.comm.packing import all_finite
from commhooks.engine.session import Session
from commhooks.errors import logger_of
from commhooks.gradients import precision
from commhooks.gradients.layout import Bucket
from commhooks.gradients.loss_scale import LossScale, ScaleOf, scaler_of
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.torch_private import sparse_values

logger = logger_of(__name__)


class NonfiniteWarning:
    """Warns in the first pass with nonfinite averages and names the ranks whose own gradients are
    not finite. All ranks must run it.

    A hook with learned state knows by itself whether a pass is good; the averages of other hooks
    are read once more, on the CPU only. Only a bad pass needs a collective: the average is the same
    on all ranks, and so is the decision. On an accelerator the host does not wait: bad passes are
    known once the hook's counters have been read.
    """

    def __init__(self, session: Session, source: GradientSource, *, logs: bool) -> None:
        self._session = session
        self._counters = session.counters
        self._source = source
        self._on_host = precision.is_host_readable(source.device)
        # Without learned state the ranks that hold other shards do not know of a bad pass.
        self._logs = logs if session.compressor.transactional else source.group.rank() == 0
        self._futures: list[Future] = []
        self._bad_before = 0
        self._done = False

    def watched(self, run: Callable[[Bucket], Future]) -> Callable[[Bucket], Future]:
        """Return `run`, which reduces a bucket, so that `after_pass` sees the averages."""

        def reduce(bucket: Bucket) -> Future:
            future = run(bucket)
            if self._on_host and not (self._done or self._session.compressor.checks_finite):
                self._futures.append(future)
            return future

        return reduce

    def before_pass(self) -> None:
        self._futures.clear()
        if not self._on_host:
            self._look()

    def after_pass(self) -> None:
        if self._on_host:
            self._look()

    def _look(self) -> None:
        bad = self._counters.nonfinite_steps > self._bad_before or not self._averages_are_finite()
        self._bad_before = self._counters.nonfinite_steps
        if bad and not self._done and nobody_skips(self._session.consensus.binding.loss_scale):
            self._done = True
            blame = self._blame() if self._on_host else "on some rank"
            if self._logs:
                logger.warning(
                    "the gradients of backward pass %d are not finite %s, so their average is not"
                    " finite on any rank, and no GradScaler skips this step: unless your own code"
                    " skips it, the optimizer now writes inf or NaN into the weights of all ranks."
                    " docs/ddp.md#inf-and-nan shows how to skip or to stop.",
                    self._counters.backward_passes,
                    blame,
                )

    def _averages_are_finite(self) -> bool:
        futures = self._futures
        self._futures = []
        # DDP waits for the same futures next. It raises their errors.
        return self._done or all(_is_finite(future.wait()) for future in futures)

    @torch.no_grad()
    def _blame(self) -> str:
        """Return which ranks and which parameter are to blame. All ranks must call this."""
        source = self._source
        gradients = source.gradients().items()
        name = next(
            (name for name, grad in gradients if grad is not None and not _is_finite(grad)), ""
        )
        if not source.keeps_own_gradients:
            return f"on some rank (in the average the first parameter is {name})"
        names = gather_texts(
            name, source.group, source.device, "the names of gradients that are not finite"
        )
        ranks = dist.get_process_group_ranks(source.group)
        bad = [f"rank {rank} ({name})" for rank, name in zip(ranks, names, strict=True) if name]
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        if not bad:
            return "once they are added up or rounded for the wire"
        return f"on {', '.join(bad[:4])}{more}"


def nobody_skips(loss_scale: Callable[[], LossScale] | None) -> bool:
    """Return whether there is no GradScaler, which would skip a step that is not finite."""
    scaler = scaler_of(loss_scale)
    if scaler is None:
        return loss_scale is None or isinstance(loss_scale, ScaleOf)
    return not scaler.is_enabled()


def _is_finite(tensor: torch.Tensor) -> bool:
    values = sparse_values(tensor) if tensor.is_sparse else tensor
    return bool(all_finite(torch.view_as_real(values) if values.is_complex() else values))
