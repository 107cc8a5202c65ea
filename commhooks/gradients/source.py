"""Define sources of gradients, which connect hooks and a model, and that of an unwrapped model."""

import contextlib
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from commhooks.errors import AttachError, HookConfigError, HookRunError
from commhooks.gradients.layout import Bucket
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.names import ModelNames, ParameterNames, all_names, own_name
from commhooks.gradients.precision import dtype_name
from commhooks.gradients.profiling import span
from commhooks.gradients.torch_private import current_task, run_after_backward

Future = torch.futures.Future[torch.Tensor]


class PassListener(Protocol):
    """Listens to the synchronised backward passes of a model."""

    def before_pass(self) -> None:
        """Called before the first bucket of every pass."""

    def after_pass(self) -> None:
        """Called after the last bucket was passed to the hook. Not called if the pass ends in an
        exception.
        """


@dataclass
class HookCallbacks:
    """Holds the functions that a source of gradients calls in each backward pass.

    Attributes:
        run: reduces one bucket and returns a future of the result.
        finish: completes all futures of a pass in which no bucket was marked as the last.
        owner: an object to keep alive as long as the DDP model.
        listeners: what else is called in every pass.
        after_first_pass: called at the end of the first pass.
    """

    name: str
    run: Callable[[Bucket], Future]
    finish: Callable[[], None]
    owner: object = None
    listeners: Sequence[PassListener] = ()
    after_first_pass: Callable[[], None] | None = None

    def begin_pass(self) -> None:
        for listener in self.listeners:
            listener.before_pass()

    def reduce(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self.begin_pass()
        with span("hook call", self.name):
            return self.run(bucket)

    def end_pass(self) -> None:
        """End a pass in which no bucket was marked as the last."""
        self.finish()
        self.on_pass_end()

    def on_pass_end(self) -> None:
        for listener in self.listeners:
            listener.after_pass()
        after_first_pass = self.after_first_pass
        self.after_first_pass = None
        if after_first_pass is not None:
            after_first_pass()


@dataclass(frozen=True)
class Extent:
    """Describes where this rank's shard, of shape `shape`, lies in the whole parameter.

    The parameter has the shape `whole`. The shard begins at index `start` of dimension `dim`, and
    is complete in the other dimensions.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


def held_weakly(group: dist.ProcessGroup) -> Callable[[], dist.ProcessGroup]:
    """Return a function that returns `group`, or raises HookRunError after `destroy_process_group`.

    A hook that owned the group would keep its threads and store alive. If the garbage collector
    destroyed the group in a forked process, such as a DataLoader's worker, the process would die,
    because the group's threads do not exist there.
    """
    weak = weakref.ref(group)

    def alive() -> dist.ProcessGroup:
        group = weak()
        if group is None:
            raise HookRunError(
                "the process group of this communication hook was destroyed"
                " (destroy_process_group): wrap the model anew after init_process_group, and attach"
                " a hook to it"
            )
        return group

    return alive


def keep_with(owner: object, kept: object) -> None:
    """Keep `kept` alive until `owner` is deleted.

    A finalizer holds it, because the garbage collector destroys the parts of an object in any
    order.
    """
    weakref.finalize(owner, lambda _: None, kept).atexit = False  # at exit `owner` may still exist


def close_with(owner: object, close: Callable[[], None]) -> None:
    """Call `close` in a thread when `owner` is deleted, but not when the process ends.

    In a thread, because the garbage collector may run in one for which `close` would wait. It is no
    daemon: the process would abort if it came back from native code while the interpreter ends.
    """
    weakref.finalize(owner, functools.partial(_start, close)).atexit = False


def _start(close: Callable[[], None]) -> None:
    threading.Thread(target=close, name="commhooks end").start()


class GradientSource(ABC):
    """Provides the buckets of a model. References to modules and process groups are weak.

    Attributes:
        names: the parameters that are reduced; in a sharded model, this rank's shards.
        sparse: ids of the parameters whose gradients are sparse.
        nothing_to_reduce: the error message if `names` is empty.
        from_ddp: whether DDP reduces the gradients. Then buckets have torch's `GradBucket`, which
            users' functions need, and without a hook DDP averages over `group` itself.
    """

    names: ModelNames
    device: torch.device
    sparse: set[int]
    nothing_to_reduce: ClassVar[str]
    from_ddp: ClassVar[bool]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = held_weakly(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group over which gradients are averaged.

        Raises HookRunError if it was destroyed.
        """
        return self._group()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the shards of one replica; None without sharding.

        A step is committed on all of these ranks or on none.
        """
        return None

    @property
    @abstractmethod
    def module(self) -> torch.nn.Module | None: ...

    @abstractmethod
    def register(self, callbacks: HookCallbacks, state: Any) -> None:
        """Register the hook with the model; DDP passes `state` to it.

        Raises AttachError if the model has a hook.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks of `group`, by name.

        {} if the model was deleted.
        """

    def not_averaged(self) -> list[str]:
        """Return the names of the parameters that require gradients now and are not reduced."""
        averaged = {id(parameter) for parameter in self.names.named_parameters().values()}
        return [
            name
            for name, weight in self.weights().items()
            if weight.requires_grad and id(weight) not in averaged
        ]

    @abstractmethod
    def unregister(self) -> None:
        """Undo `register`, between two backward passes.

        Raises AttachError if the model cannot remove its hook.
        """

    def described(self) -> list[str]:
        """Return a line per parameter. The lines are equal on two ranks if their models are."""
        return [described_parameter(name, parameter) for name, parameter in self.weights().items()]

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.names.named_parameters().items()}

    @property
    def keeps_own_gradients(self) -> bool:
        """Whether `gradients` stay this rank's own, outside the buckets, until the pass ends."""
        return False

    def stepped(self) -> Sequence[torch.Tensor]:
        """Return the parameters that optimizers hold, in the order of `names`."""
        return list(self.names.named_parameters().values())

    def before_weights_change(self) -> None:
        """Prepare for a change of the weights.

        Must be called before anything but an optimizer changes weights.
        """
        return None

    def let_ranks_differ(self) -> list[str]:
        """Stop synchronising buffers, such as running statistics.

        Return warnings about what every step still sends.
        """
        return []

    def close(self) -> None:
        """Undo `register` if possible. No further backward pass will call the hook."""
        return None

    def when_model_ends(self, close: Callable[[], None]) -> None:
        """Call `close` in a thread when the model is deleted, but not when the process ends."""
        assert self.module is not None
        close_with(self.module, close)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See `CommHook.no_sync`."""
        raise HookConfigError(
            "no_sync() of a hook is for a module that nothing wraps: use no_sync() of a"
            " DistributedDataParallel model, or set_requires_gradient_sync(False) of a model that"
            " is sharded by fully_shard"
        )

    # ---- shards; by default each parameter is one shard ------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """The index of this rank's shard, and the number of shards."""
        return 0, 1

    @property
    def whole(self) -> ParameterNames:
        """`names` with whole parameters, which may be on the meta device."""
        return self.names

    def extent(self, name: str) -> Extent:
        shape = tuple(self.names.named_parameters()[name].shape)
        return Extent(shape, shape)

    def as_whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's `part` as a tensor with the parameter's placement."""
        return part


def call_after_accumulation(
    parameters: Iterable[torch.Tensor], method: Callable[[torch.Tensor], None]
) -> list[RemovableHandle]:
    """Call `method(parameter)` when a gradient has been accumulated, while its object exists.

    The garbage collector cannot look into a parameter's hooks (torch 2.13): a hook that owned the
    object, which owns the parameters, would keep them and the process group alive for ever.
    """
    weak = weakref.WeakMethod(method)

    def call(parameter: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(parameter)

    return [parameter.register_post_accumulate_grad_hook(call) for parameter in parameters]


def described_parameter(name: str, parameter: torch.Tensor) -> str:
    frozen = "" if parameter.requires_grad else " (frozen)"
    return f"{own_name(name)} {tuple(parameter.shape)} {dtype_name(parameter.dtype)}{frozen}"


class PlainGradients(GradientSource):
    """Reads the gradients of an unwrapped module.

    It is for hooks that average weights with one process per machine: at the end of the backward
    pass each gradient becomes a bucket. `accumulates`: returns whether the running pass only
    accumulates gradients, for frameworks; other loops use `no_sync`. Raises AttachError if a
    parameter has a hook already.
    """

    nothing_to_reduce = (
        "no parameter of this model requires a gradient: a hook would have nothing to do"
    )
    from_ddp = False

    def __init__(
        self,
        module: torch.nn.Module,
        group: dist.ProcessGroup,
        accumulates: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(group)
        self._module = weakref.ref(module)
        self._accumulates = accumulates
        trained = {
            own_name(name): parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.names = ModelNames(trained.items(), all_names(module))
        self.sparse = sparse_parameters(module)
        self.device = next(iter([*trained.values(), torch.empty(0)])).device
        self._callbacks: HookCallbacks | None = None
        self._handles: list[RemovableHandle] = []
        self._task = -1  # the running backward pass
        self._in_no_sync = False
        self._check_free()

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self._in_no_sync
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = before

    def register(self, callbacks: HookCallbacks, state: Any) -> None:
        self._callbacks = callbacks
        self._handles = call_after_accumulation(
            self.names.named_parameters().values(), self._on_accumulated
        )
        _hooked.add(self)
        module = self.module
        assert module is not None
        keep_with(module, self)

    def _check_free(self) -> None:
        for other in list(_hooked):
            taken = set(map(id, other.names.named_parameters().values()))
            for name, parameter in self.names.named_parameters().items():
                if id(parameter) in taken and other._callbacks is not None:
                    raise AttachError(
                        f"parameter {name} has the hook {other._callbacks.name!r} already: call its"
                        " detach() before you attach another one"
                    )

    def unregister(self) -> None:
        _hooked.discard(self)
        self._callbacks = None  # the module keeps this object, but not what the hook holds
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        self.unregister()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {} if self.module is None else dict(self.module.named_parameters())

    def _on_accumulated(self, _: torch.Tensor) -> None:
        only_accumulates = self._in_no_sync or (
            self._accumulates is not None and self._accumulates()
        )
        if self._task != current_task() and not only_accumulates:
            self._task = current_task()
            run_after_backward(self._end_pass)

    @plain_mode()
    def _end_pass(self) -> None:
        self._task = -1
        assert self._callbacks is not None
        futures: list[tuple[torch.Tensor, torch.Tensor, Future]] = []
        for parameter in self.names.named_parameters().values():
            grad = parameter.grad
            if grad is None:
                continue
            flat = grad if grad.is_sparse else grad.contiguous().view(-1)
            bucket = Bucket(flat, [parameter], index=len(futures), is_last=False)
            futures.append((grad, flat, self._callbacks.reduce(bucket)))
        for grad, flat, future in futures:
            reduced = future.wait()
            if not grad.is_sparse and (reduced is not flat or flat.data_ptr() != grad.data_ptr()):
                grad.copy_(reduced.view(grad.shape))
        self._callbacks.end_pass()


_hooked: "weakref.WeakSet[PlainGradients]" = weakref.WeakSet()
"""Those with a hook. A module shows no hook of its parameters."""


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    return {
        id(embedding.weight)
        for embedding in module.modules()
        if isinstance(embedding, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and embedding.sparse
    }
