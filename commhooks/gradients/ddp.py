"""Read gradients from a `DistributedDataParallel` model."""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from commhooks.errors import AttachError, HookRunError, logger_of
from commhooks.gradients import precision
from commhooks.gradients.layout import Bucket
from commhooks.gradients.names import ModelNames, all_names, own_name
from commhooks.gradients.source import (
    Future,
    GradientSource,
    HookCallbacks,
    close_with,
    keep_with,
    sparse_parameters,
)
from commhooks.gradients.torch_private import (
    current_task,
    has_optimizer_in_backward,
    in_join,
    joined_with_uneven_division,
    run_after_backward,
)

logger = logger_of(__name__)

_NO_BUCKET_YET = sys.maxsize


class BucketReader:
    """Converts DDP's buckets, and detects the first and the last bucket of each backward pass.

    `parameters`: the number of parameters in the model; None: unknown.

    With `static_graph`, DDP reduces all buckets of its first backward pass at the end of the pass,
    all with index 0 and none marked as the last (torch 2.13, `delay_all_reduce`). They are numbered
    here, and the last one is detected by counting parameters.
    """

    def __init__(self, parameters: int | None = None) -> None:
        self._parameters = parameters
        self._index = _NO_BUCKET_YET  # index of the latest bucket in the running pass
        self._task = -1  # the backward pass in which it was read
        self._read = 0  # parameters read so far in a pass with `static_graph`

    def read(self, grad_bucket: object, end_pass: Callable[[], None] | None = None) -> Bucket:
        """Convert the next bucket.

        Raises HookRunError as `checked_bucket` does, or if the last bucket of the pass cannot be
        detected. `end_pass` is called at the end of a pass whose last bucket never arrives, because
        DDP skips buckets that no rank uses.
        """
        checked = checked_bucket(grad_bucket)
        index = checked.index()
        is_last = checked.is_last()
        parameters = checked.parameters()
        task = current_task()
        is_new_task = task != self._task
        # An ordinary pass comes here once. Only a second index 0 in the same task means
        # static_graph. Task -1: no backward pass is running.
        if index == 0 and not is_last and task != -1:
            if is_new_task:
                self._read = 0
            elif self._parameters is None:
                raise HookRunError(
                    "DistributedDataParallel(static_graph=True) reduces the first backward pass in"
                    " several buckets (of several dtypes, or with sparse gradients) and does not"
                    " mark the last one: use commhooks.attach(ddp_model, hook, hook_state=state),"
                    " which detects it, not register_comm_hook"
                )
            else:
                index = self._index + 1
            self._read += len(parameters)
            is_last = self._read == self._parameters
        # The index increases within a pass, and `_NO_BUCKET_YET` is larger than any. After a pass
        # that ended in an exception, `_index` is not reset.
        is_first = index <= self._index
        self._index = _NO_BUCKET_YET if is_last else index
        self._task = task
        # Queue the callback again for each task: reentrant checkpointing runs backward passes
        # inside this one, and callbacks queued in an inner pass are dropped at its end.
        if end_pass is not None and not is_last and (is_first or is_new_task):
            run_after_backward(functools.partial(self._at_the_end, end_pass))
        return Bucket(checked.buffer(), parameters, index, is_last, is_first, checked)

    def _at_the_end(self, end_pass: Callable[[], None]) -> None:
        if self._index != _NO_BUCKET_YET:
            self._index = _NO_BUCKET_YET
            end_pass()


class DDPGradients(GradientSource):
    nothing_to_reduce = (
        "no parameter of this model is reduced by DDP (all are frozen, ignored or delayed), so a"
        " communication hook would have nothing to do: leave out the hook, or unfreeze parameters"
        " before DDP wraps the model"
    )

    from_ddp = True

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        group: dist.ProcessGroup | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Read the gradients of `ddp_model`.

        `group` and `module` default to its process group and to the module that it wraps. Raises
        AttachError if DDP has registered a hook of its own.
        """
        _check_free(ddp_model)
        self.finds_unused = ddp_model.find_unused_parameters and not ddp_model.static_graph
        self._ranks_differ = False
        self._closed = False
        self._used: set[int] | None = None
        """Ids of the parameters used since the last synchronised pass; None: all."""
        self._ddp_model = weakref.ref(ddp_model)
        user_module = ddp_model.module if module is None else module
        self._module = weakref.ref(user_module)
        super().__init__(ddp_model.process_group if group is None else group)
        reduced = [(own_name(name), p) for name, p in self.weights().items() if p.requires_grad]
        self.names = ModelNames(reduced, all_names(user_module))
        self.sparse = sparse_parameters(user_module)
        self._reader = BucketReader(len(self.names.named_parameters()))
        # If all parameters were frozen after wrapping, `names` is empty: take the device of a
        # frozen parameter.
        parameters = [*self.names.named_parameters().values(), *ddp_model.module.parameters()]
        self.device = parameters[0].device

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module() if self._ddp_model() is not None else None

    @property
    def keeps_own_gradients(self) -> bool:
        ddp_model = self._ddp_model()
        return ddp_model is not None and not ddp_model.gradient_as_bucket_view

    def register(self, callbacks: HookCallbacks, state: Any) -> None:
        ddp_model = self._ddp_model()
        assert ddp_model is not None
        hook = _Registered(callbacks.name, self._reduce, callbacks)
        try:
            ddp_model.register_comm_hook(state, hook)
        except RuntimeError as error:
            # torch 2.13: "register_comm_hook or register_builtin_comm_hook can only be called
            # once."
            raise AttachError(
                "this DistributedDataParallel model has a communication hook already, so"
                f" {callbacks.name!r} cannot be attached: DDP cannot replace a hook; wrap the model"
                " anew to change it"
            ) from error
        keep_group_until_reducer_ends(ddp_model)
        if self.finds_unused:
            self._used = set()
            # a method would keep this object alive
            note = functools.partial(_note_used, self._used)
            handles = [
                parameter.register_post_accumulate_grad_hook(note)
                for parameter in self.names.named_parameters().values()
            ]
            weakref.finalize(ddp_model, _remove, handles).atexit = False

    def unregister(self) -> None:
        raise AttachError(
            "DistributedDataParallel cannot remove a communication hook; wrap the model anew to"
            " change it"
        )

    def _reduce(self, callbacks: HookCallbacks, state: Any, bucket: dist.GradBucket) -> Future:
        if self._closed:
            raise HookRunError(
                f"a backward pass after close() of this hook ({callbacks.name!r}), which ended its"
                " training: wrap the model in a new DistributedDataParallel, and attach a hook to"
                " that"
            )
        # torch checks that the parameter of a hook is called `bucket`
        flat_bucket = self._reader.read(bucket, functools.partial(self._end_pass, callbacks))
        if self._used is not None:
            flat_bucket.unused = [
                place
                for place, parameter in enumerate(flat_bucket.parameters)
                if parameter.grad is not None and id(parameter) not in self._used
            ]
        if flat_bucket.is_first:
            self._check_join()
        future = callbacks.reduce(flat_bucket)
        if flat_bucket.is_last:
            callbacks.on_pass_end()
            if self._used is not None:
                self._used.clear()
        return future

    def _end_pass(self, callbacks: HookCallbacks) -> None:
        callbacks.end_pass()
        if self._used is not None:
            self._used.clear()

    def close(self) -> None:
        self._closed = True

    def when_model_ends(self, close: Callable[[], None]) -> None:
        close_with(self._ddp_model(), close)  # the module that it wraps may live on

    def let_ranks_differ(self) -> list[str]:
        ddp_model = self._ddp_model()
        assert ddp_model is not None
        self._ranks_differ = True
        stop_buffer_broadcasts(ddp_model)
        if not self.finds_unused:
            return []
        return [
            "with find_unused_parameters=True DDP sends a message in every step, between outer"
            " steps, too: if every parameter is used give False (to transformers' Trainer as"
            " ddp_find_unused_parameters)"
        ]

    def weights(self) -> Mapping[str, torch.Tensor]:
        ddp_model = self._ddp_model()
        module = self.module
        if ddp_model is None or module is None:
            return {}
        ignored = ddp_model.parameters_to_ignore
        averaged = {
            id(parameter)
            for name, parameter in ddp_model.module.named_parameters()
            if name not in ignored
        }
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if id(parameter) in averaged
        }

    def _check_join(self) -> None:
        ddp_model = self._ddp_model()
        if ddp_model is None:
            return
        # In this mode gradients are divided by the number of active ranks, which DDP does not pass
        # to hooks.
        if joined_with_uneven_division(ddp_model):
            raise HookRunError(
                "a communication hook divides gradients by the world size;"
                " Join(divide_by_initial_world_size=False) asks for the number of active ranks"
                " instead. Use divide_by_initial_world_size=True, or no hook"
            )
        if self._ranks_differ and in_join(ddp_model):
            raise HookRunError(
                "join() with a hook that averages weights: a rank that has run out of data takes no"
                " steps, and the others would wait for it in their outer steps. Give all ranks the"
                " same number of batches, or take a hook that averages gradients"
            )


class _Registered(functools.partial[Future]):
    """Wraps the function that is registered with DDP, which shows its `__name__` in logging data.

    `torch.save(ddp_model)`, `copy.deepcopy` and `AveragedModel(ddp_model)` pickle it, but register
    no hook in the copy (torch 2.13). So its pickle leaves out the hook with its process group and
    learned state.
    """

    def __new__(cls, name: str, function: Callable[..., Future], *args: Any) -> "_Registered":
        hook = super().__new__(cls, function, *args)
        vars(hook).update(__name__=name, __qualname__=name)
        return hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (vars(self)["__name__"],)


def _copied(name: str) -> _Registered:
    logger.info(
        "a model with hook %r was copied or loaded whole: the copy has no hook until one is"
        " attached.",
        name,
    )

    def refuse(state: Any, bucket: dist.GradBucket) -> Future:
        raise HookRunError(
            f"this function is from a copy of a model with the hook {name!r}, and copies have no"
            " hook: attach one with commhooks.attach(copied_model, ...)"
        )

    return _Registered(name, refuse)


def _note_used(used: set[int], parameter: torch.Tensor) -> None:
    used.add(id(parameter))


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def keep_group_until_reducer_ends(ddp_model: DistributedDataParallel) -> None:
    """Keep the process group alive until DDP's `Reducer` is destroyed.

    As the last owner of the group, the `Reducer` would destroy it while it holds the GIL (torch
    2.13). On gloo that can deadlock: the group waits for its threads, and a thread waits for the
    GIL to free the tensors of the latest collective.
    """
    keep_with(ddp_model.reducer, ddp_model.process_group)


def checked_bucket(grad_bucket: object) -> dist.GradBucket:
    """Return `grad_bucket`, or raise HookRunError if hooks cannot reduce it.

    They cannot if it is not a GradBucket, as with compiled DDP, or if a CUDA graph is being
    captured.
    """
    if not isinstance(grad_bucket, dist.GradBucket):
        raise HookRunError(
            "this hook was called without a GradBucket: compiled DDP with"
            " optimize_ddp='python_reducer' is not supported; set torch._dynamo.config.optimize_ddp"
            " = 'ddp_optimizer'"
        )
    if precision.is_capturing(grad_bucket.buffer().device):
        raise HookRunError(
            "this backward pass is being captured in a CUDA graph: communication hooks are Python,"
            " which a replay does not run. Capture parts of the model with"
            " torch.cuda.make_graphed_callables before wrapping it in DDP, so that the hook runs"
            " outside of the graphs; or train without a hook"
        )
    return grad_bucket


def _check_free(ddp_model: DistributedDataParallel) -> None:
    if ddp_model.mixed_precision is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=...) registers a communication hook of its"
            " own, and DDP takes one only; use autocast for mixed precision, or wrapper='fp16' or"
            " 'bf16' to send less"
        )
    if any(map(has_optimizer_in_backward, ddp_model.module.parameters())):
        raise AttachError(
            "an optimizer applied in backward registers a communication hook of its own, and DDP"
            " takes one only; use an ordinary optimizer"
        )


def stop_buffer_broadcasts(ddp_model: DistributedDataParallel) -> None:
    """Keep DDP from copying rank 0's buffers to all ranks in every forward pass. Raises AttachError
    if this version of torch has no attribute for it that is known here.
    """
    # torch 2.14 renames the attribute, and keeps the old name as a property for the time being.
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        if hasattr(ddp_model, name):
            setattr(ddp_model, name, False)
            return
    raise AttachError(
        f"DistributedDataParallel of torch {torch.__version__} has neither forward_sync_buffers nor"
        " broadcast_buffers, so it would overwrite the buffers of all ranks with rank 0's: hooks"
        " that average weights need a version of torch that has one of them"
    )
