"""A hook that averages weights, once in several steps: between two outer steps every rank trains on its own gradients.

A round is `sync_every` backward passes. The outer step comes after the optimizer's step that follows the last of them,
and before anything that looks at the model as a whole: a joint save, and `CommHook.synchronize`.
"""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collective
from commhooks.comm.collective import Send, gather_rows, new_future
from commhooks.comm.counters import RoundCounters
from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.compressors.local_steps.exchange import ANCHOR
from commhooks.engine.immediate import reduce_immediately
from commhooks.engine.session import Session
from commhooks.errors import logger_of
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.optimizer_steps import OptimizerSteps
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.weights import changes, set_weights, weight_buckets, write_back
from commhooks.hook.engine_hook import EngineHook
from commhooks.hook.request import HookRequest

logger = logger_of(__name__)


class LocalStepsHook(EngineHook):
    """
    Args:
        session: runs outer steps, on buckets of weights.
        counters: those of the session.
    """

    def __init__(self, request: HookRequest, source: GradientSource, session: Session, counters: RoundCounters) -> None:
        super().__init__(request, source, session)
        self._passes = counters
        self._exact = AllReduceCompressor(AllReduce())
        self._in_round = 0
        self._due = False
        self._moments_differ = False
        self._weights_differ = False  # from the anchor that was loaded
        self._buffers: list[torch.Tensor] | None = None  # as they were when they were equal on all ranks
        self._buffers_differ = False
        self._told = False
        # Bound methods would keep this object, and with it the learned state, as long as torch's hooks.
        this = weakref.ref(self)
        self._optimizers = OptimizerSteps(source.names.known().values(), functools.partial(_outer_step_of, this))
        module = source.module
        assert module is not None
        self._before_forward = module.register_forward_pre_hook(functools.partial(_before_forward, this))
        source.keep_buffers_apart()

    # ---- backward passes ---------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        if bucket.is_first:
            self._passes.begin_gradients()
            self._buffers_differ = True
            if not self._averages_gradients and not self._session.state[ANCHOR.key]:
                self._reduce_weights()  # the first time, this makes the anchor, of weights that are equal on all ranks
        self._passes.gradients_of_pass(bucket.numel_here * bucket.flat.element_size())
        if self._averages_gradients:
            future = reduce_immediately(self._exact, bucket, self._source.group, self._passes)
        else:
            future = new_future(bucket.flat.device)
            future.set_result(bucket.flat)
        if bucket.is_last:
            self.end_pass()
        return future

    def end_pass(self) -> None:
        if self._averages_gradients:
            return
        self._in_round += 1
        self._moments_differ = True
        if self._in_round >= self._session.compressor.config.sync_every:
            self._due = True
            self._optimizers.expect()

    @property
    def _averages_gradients(self) -> bool:
        """Whether the running pass is one of the first `start_iter` ones."""
        begun: int = self._passes.cumulative()["backward_passes"]
        return begun <= self._session.compressor.config.start_iter

    @property
    def replicas_agree(self) -> bool:
        return self._in_round == 0

    # ---- outer steps -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        if self._in_round:
            self._outer_step()
        elif self._buffers_differ:
            self._average_buffers()

    def before_save(self) -> None:
        """End the round, and average what the optimizers have learned: so the model and the optimizers of any rank are
        those of all, and a run that resumes goes on as this one does."""
        self.synchronize()
        if self._moments_differ:
            self._average(self._optimizers.moments(), "the optimizers' state")
            self._moments_differ = False

    def loaded(self) -> None:
        self._in_round, self._due, self._moments_differ = 0, False, False
        self._buffers, self._buffers_differ = None, False
        self._weights_differ = bool(self._session.state[ANCHOR.key])

    def outer_step_if_due(self) -> None:
        if self._due:
            self._outer_step()

    @torch.no_grad()
    def before_forward(self, module: torch.nn.Module) -> None:
        """Before a step of training: make up for an outer step for which the optimizers were waited for in vain, as
        after an overflow; and after a load begin from the anchor, of which this rank's weights may not be."""
        if not module.training:
            return
        if self._weights_differ:
            self._weights_differ = False
            set_weights(self._source.names.known(), self._session.state[ANCHOR.key])
        self.outer_step_if_due()
        if self._buffers is None:
            self._buffers = [each.clone() for each in _numbers(module)]

    @torch.no_grad()
    def _outer_step(self) -> None:
        """All ranks must call this, between the same two steps."""
        state = self._session.state
        discarded = state.nonfinite_steps
        write_back(self._reduce_weights())
        self._average_buffers()
        self._in_round, self._due = 0, False
        self._optimizers.forget()
        self.settle()
        if state.nonfinite_steps > discarded and not self._told and self.is_logging_rank:
            self._told = True
            logger.warning(
                "hook %s: the weights of at least one rank are not finite, so the round that ended after %s backward "
                "passes is discarded: all ranks go back to the weights from before it. Later ones are counted in "
                "stats()['nonfinite_steps'] only.",
                self._request.name,
                self._passes.backward_passes,
            )

    @torch.no_grad()
    def _reduce_weights(self) -> list[Bucket]:
        """Copies of the weights, reduced over the ranks."""
        buckets = weight_buckets(self._source.names.known())
        for future in [self._session.run(bucket) for bucket in buckets]:
            future.wait()
        return buckets

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """What a model keeps beside its weights, such as the running statistics of a BatchNorm: numbers are averaged,
        integers taken from rank 0. What has not changed keeps its bits."""
        self._buffers_differ = False
        module = self._source.module
        if module is None:
            return
        numbers, before = _numbers(module), self._buffers or []
        if len(numbers) == len(before):
            moved = [changes(now, was) for now, was in zip(numbers, before, strict=True)]
            self._average(moved, "the model's buffers")
            for now, was, change in zip(numbers, before, moved, strict=True):
                now.copy_(torch.where(change == 0, was, was + change))
        for each in module.buffers():
            if not each.is_floating_point() and not each.is_complex() and each.numel():
                row = each.detach().reshape(-1).to(torch.int64)
                first = gather_rows(row, self._source.group, self._passes, "the model's buffers")[0]
                each.copy_(first.view(each.shape))
        self._buffers = [each.clone() for each in numbers]

    def _average(self, tensors: list[torch.Tensor], what: str) -> None:
        """Replace each tensor by its mean over the ranks."""
        if not tensors:
            return
        group = self._source.group
        row = torch.tensor([sum(each.numel() for each in tensors)], device=self._source.device)
        sizes = {int(size) for size in gather_rows(row, group, self._passes, what)}
        if len(sizes) > 1:
            if self.is_logging_rank:
                logger.warning(
                    "hook %s: %s are not of one size on all ranks, and stay as they are.", self._request.name, what
                )
            return
        for each in tensors:
            mean = each.to(torch.float64 if each.dtype == torch.float64 else torch.float32).div(group.size())
            collective.start(Send(mean.contiguous(), what=what, last=True), group, self._passes, "").wait()
            each.copy_(mean)

    def close(self) -> None:
        super().close()
        self._optimizers.close()
        self._before_forward.remove()


def _numbers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in module.buffers() if each.is_floating_point() and each.numel()]


def _outer_step_of(hook: "weakref.ref[LocalStepsHook]") -> None:
    alive = hook()
    if alive is not None:
        alive.outer_step_if_due()


@torch.compiler.disable
def _before_forward(hook: "weakref.ref[LocalStepsHook]", module: torch.nn.Module, inputs: Any) -> None:
    alive = hook()
    if alive is not None and torch.is_grad_enabled():
        alive.before_forward(module)
