"""What the source of the gradients calls in a backward pass: base of the kinds of hooks, those of the engine and users'
functions. `CommHook` asks it for all that differs between them."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.state import SavedLearnedState
from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.collectives import agreement_key
from commhooks.comm.counters import Counters
from commhooks.comm.groups import is_logging_rank
from commhooks.engine.kernel_choice import Choice, KernelSupport
from commhooks.errors import HookRunError, logger_of
from commhooks.gradients.ddp import BucketReader
from commhooks.gradients.layout import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.source import Future, GradientSource, Reducer
from commhooks.gradients.torch_private import current_task
from commhooks.hook.announce import say
from commhooks.hook.copies import Registered
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.replica_check import ReplicaCheck
from commhooks.hook.unused import UnusedWarning, Use
from commhooks.request import HookRequest

logger = logger_of(__name__)


class Runner(ABC):
    """
    Attributes:
        counters: the counters of this rank.
        saved_state: saves and loads the state of the hook.
        counts_bytes: whether the sent bytes are known.
        step_is: what `stats()["step"]` counts.
        counts_outcomes: whether it is known which steps were committed and which were compressed.
        run: reduces one bucket. All ranks must call it, in the same order.
        choice: the kernel that all ranks use.
        said: what the hook has decided, for rank 0 to say at the end of the pass; see `Consensus.remarks`.
        unused: warns if the training does not use the hook.
    """

    run: Callable[[Bucket], Future]
    counts_bytes = True
    counts_outcomes = False
    step_is = "step"

    def __init__(
        self,
        request: HookRequest,
        source: GradientSource,
        counters: Counters,
        saved_state: SavedLearnedState | SavedUserState,
    ) -> None:
        self.counters = counters
        self.saved_state = saved_state
        self.choice = Choice()
        self.said: list[str] = []
        self.rank, self.world_size = source.group.rank(), source.group.size()
        self.is_logging_rank = is_logging_rank(source.group, source.shard_group)
        self._request = request
        self._source = source
        self._reader = BucketReader(len(source.names.known()))
        every = request.check_every
        self._replicas = ReplicaCheck(source, every, counters) if every is not None else None
        self.unused = UnusedWarning(request.name, counters, logs=self.is_logging_rank and self.world_size > 1)
        self._summarised = self._closed = False

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def register(self, state: Any, owner: object) -> None:
        """Have the model call the hook from now on. `state`: what DDP passes to its function; `owner`: the `CommHook`,
        which lives as long as the model, although nobody else may keep it."""
        name = self._request.name
        function = Registered(name, self._run, owner)
        self._source.register(Reducer(name, function, self._reduce, self._end_pass), state)
        if self.use() is None:
            self.unused.silence()
        if self._source.gives_grad_buckets:  # fully_shard calls it wherever it reduces
            self.unused.watch(self._source.stepped())

    def _run(self, state: Any, bucket: dist.GradBucket) -> Future:
        """The hook function for DDP."""
        if self._closed:
            raise HookRunError(
                f"a backward pass after close() of this hook ({self._request.name!r}), which ended its training: wrap "
                "the model in a new DistributedDataParallel, and attach a hook to that"
            )
        own = self._reader.read(bucket, self._end_pass)
        used = self._source.used
        if used is not None:
            own.unused = [i for i, p in enumerate(own.parameters) if p.grad is not None and id(p) not in used]
        future = self._reduce(own)
        if own.is_last:
            self._finish_pass()
        return future

    def _reduce(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self._begin_pass()
        return self.run(bucket)

    def _end_pass(self) -> None:
        """The last bucket of the pass was not marked as the last."""
        self.end_pass()
        self._finish_pass()

    def _begin_pass(self) -> None:
        self.unused.called()
        self._source.check_pass()
        if self._replicas is not None and self.replicas_agree and self._replicas.due():
            self.settle()
            plan = agreement_key(*(repr(row) for row in self.plan().parameters))
            # Outside of a backward pass `Join` shadows the collectives of a rank that has run out of data.
            self._replicas.compare(self.saved_state.step, plan, taking_part=current_task() != -1)

    def _finish_pass(self) -> None:
        if self._source.used is not None:
            self._source.used.clear()
        if not self._summarised:
            self._summarised = True
            if self.is_logging_rank:
                say(self._summary())
                for remark in self.remarks(checked=self._replicas is not None):
                    logger.warning("%s", remark)
        for line in self.said if self.is_logging_rank else ():
            say(line)
        self.said.clear()

    def _summary(self) -> str:
        """What the hook does, in one line."""
        name, details, use = self._request.name, self.details(), self.use()
        about = f"{name} ({'; '.join(details)})" if details else name
        if self.world_size == 1:
            unit = "rank" if self._source.shard_group is None else "replica"
            return f"{about}: there is one {unit}, so nothing is sent{self.alone()}"
        effect = self.effect() + (f", {self._request.wrapper} on the wire" if self._request.wrapper is not None else "")
        if use is not None and use.plain:
            effect = f"plain all-reduce until step {use.begins}{use.or_later}, then {effect}"
        return f"{about}: {effect}" if effect else about

    def quiet(self) -> None:
        """See `CommHook.quiet`."""
        self._summarised = True
        self.unused.silence()

    def will_end(self, passes: int) -> None:
        """See `CommHook.will_end`."""
        if (use := self.use()) is not None:
            self.unused.before(use, passes)

    def ended(self) -> None:
        """The training has ended, as far as is known."""
        if (use := self.use()) is not None:
            self.unused.after(use)

    def close(self) -> None:
        """See `CommHook.close`."""
        self.ended()
        self._closed = True
        self._source.close()
        self.stop()

    def stop(self) -> None:
        """Take no further part in the training: called once no backward pass will call the hook."""
        return None

    # ---- what differs between the kinds of hooks ---------------------------------------------------------------------

    def end_pass(self) -> None:
        """Complete the futures of all buckets, if the last one was not marked as the last."""
        return None

    def settle(self) -> None:
        """Bring counters and step up to date; may synchronise with an accelerator."""
        return None

    @property
    def replicas_agree(self) -> bool:
        """Whether the weights should be equal on all ranks now."""
        return True

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        """See `CommHook.synchronize`. `limit_s`: seconds to wait for the other ranks."""
        return True

    def vouched(self, content: dict[str, Any], *, together: bool) -> dict[str, Any]:
        """The payload `content`, marked inexact if a run that resumes from it would not go on as this one.
        `together`: all ranks took part in the save."""
        return content

    def load(self, take_over: Callable[[], None]) -> None:
        """Load a state, which `take_over` does."""
        take_over()

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options in force, as plain types."""

    @abstractmethod
    def plan(self) -> ModelPlan:
        """See `CommHook.plan`."""

    def use(self) -> Use | None:
        """What the hook has done; None for one that is asked for nothing but plain averages, or for none."""
        return Use(acted=True)

    def details(self) -> list[str]:
        """For the summary: the main options, the kernel and the nodes."""
        return []

    def effect(self) -> str:
        """For the summary: what the hook does and sends."""
        return ""

    def alone(self) -> str:
        """For the summary where nothing is sent: what the hook does nevertheless, to be appended."""
        return ""

    @contextlib.contextmanager
    def residuals(self) -> Iterator[tuple[Mapping[str, torch.Tensor], float]]:
        """Context manager: the residuals (1-D) by parameter name, and the factor by which they are multiplied: the loss
        scale, times the ranks of a node. They may be read only in its body."""
        yield {}, 1.0

    def kept_fields(self, names: ParameterNames) -> dict[str, dict[str, torch.dtype]]:
        """What a hook keeps for each number of a parameter, such as "residual": the parameters of a model with these
        parameters that could have one, and its dtype."""
        return {}

    def measured(self, names: set[str]) -> set[str]:
        """The subset of `names` that `CommHook.norms` covers."""
        return names

    def kernel_support(self) -> KernelSupport:
        """What this machine can compute with. It may differ between ranks."""
        return KernelSupport()

    def agreed(self, choice: Choice) -> None:
        """Use the kernel on which all ranks have agreed, and find the nodes. All ranks must call this, before the first
        backward pass."""
        self.choice = choice

    def remarks(self, *, checked: bool) -> list[str]:
        """Warnings about the ranks' machines that rank 0 logs at the end of the first backward pass. `checked`: the
        replicas are compared now and then."""
        return []

    @property
    def run_number(self) -> int | None:
        """See `CommHook.run_number`."""
        return None

    @property
    def round(self) -> tuple[int | None, float | None, float | None]:
        """Of a hook that averages weights: steps in the running round, the norm of the latest outer gradient, and its
        cosine with the one before. None for others."""
        return None, None, None

    @property
    def chosen(self) -> tuple[str | None, int | None]:
        """What a hook that chooses has chosen, and since which step; None for others."""
        return None, None

    def problems(self) -> list[str]:
        """Warnings that rank 0 logs when the hook is attached."""
        return []
