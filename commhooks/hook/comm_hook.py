"""`CommHook`: the user's handle on an attached hook."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from commhooks.comm.groups import is_logging_rank, note_lost_ranks
from commhooks.errors import HookRunError, log_summary, print_error_on_rank_zero
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.source import GradientSource, HookCallbacks
from commhooks.hook.listeners import listeners_of
from commhooks.hook.protocol import Hook
from commhooks.hook.state_saver import StateSaver
from commhooks.hook.statistics import log_first_pass, statistics
from commhooks.hook.unused import UnusedWarning
from commhooks.plan import ModelPlan
from commhooks.report import norms
from commhooks.request import HookRequest

if TYPE_CHECKING:
    from commhooks.members.members import Members

JOINT_SAVE_LIMIT_S = 60.0


class CommHook:
    """The handle on a hook that `commhooks.attach` has registered.

    `stats()` and `plan()` also work after the model was deleted.

    Attributes:
        name: name of the hook.
        detached: whether `detach` has removed it from its model.
        joint_save_limit_s: seconds for which a joint save waits for the other ranks before it goes
            on without residuals.
    """

    def __init__(
        self, request: HookRequest, hook: Hook, source: GradientSource, shards: Any = None
    ) -> None:
        self.name = request.name
        self.joint_save_limit_s = JOINT_SAVE_LIMIT_S
        self.detached = False
        self._request = request
        self._hook = hook
        self._source = source
        self._shards = shards
        self._rank, self._world_size = source.group.rank(), source.group.size()
        self._logs = is_logging_rank(source.group, source.shard_group)
        self._saved = StateSaver(request, hook, source, logs=self._logs)
        logs_use = self._logs and self._world_size > 1
        self._unused = UnusedWarning(request.name, hook, source.stepped(), logs=logs_use)
        self._quiet = False

    def __repr__(self) -> str:
        model = f"attached to {type(self._source.module).__name__}"
        if self.detached or self._source.module is None:
            model = "detached" if self.detached else "its model is gone"
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        if self._request.wrapper is not None:
            options += f", wrapper={self._request.wrapper!r}"
        rank = f"rank {self._rank} of {self._world_size}"
        return f"<CommHook({self.name!r}{options}), {model}, {rank}>"

    def __reduce__(self) -> NoReturn:
        raise HookRunError(
            "a CommHook cannot be copied or pickled, because it belongs to one model and its"
            " process group: save hook.state_dict(), and load that into the hook of another model"
        )

    def quiet(self) -> None:
        """Log neither the summary nor the warning that the hook has no effect."""
        self._quiet = True
        self._unused.silence()

    def will_end(self, passes: int) -> None:
        """Warn if the run ends after `passes` further backward passes, before the hook begins."""
        self._unused.will_end(passes)

    def _register(self, state: Any, on_unused: Callable[[str], None] | None) -> None:
        hook = self._hook
        listeners = [self._unused, *listeners_of(self._request, hook, self._source)]
        callbacks = HookCallbacks(
            self.name,
            run=hook.run,
            finish=hook.end_pass,
            owner=self,
            listeners=listeners,
            after_first_pass=self._begun,
        )
        self._source.register(callbacks, state)
        # fully_shard calls a hook wherever it reduces
        watched = self._source.stepped() if self._source.from_ddp else ()
        self._unused.begin(watched, on_unused)

    def _begun(self) -> None:
        self._unused.after_first_pass()
        if self._logs and not self._quiet:
            log_first_pass(self._request, self._hook, self._source)
            if self._shards is not None:
                log_summary(self._shards.summary())

    @plain_mode()
    def detach(self) -> None:
        """Remove the hook from a model sharded by `fully_shard`, to attach another one.

        Every rank must call this between two backward passes. Without a hook, gradients are not
        averaged over the replicas. A hook that averages weights averages them once more.

        Raises:
            AttachError: the model is a DDP model, from which torch cannot remove a hook.
        """
        self._source.unregister()
        self.synchronize()
        self._unused.silence()
        self._hook.close()
        if self._shards is not None:
            self._shards.detach()
        self.detached = True

    @plain_mode()
    def close(self) -> None:
        """End the run: free the buffers, and move the learned state to the host.

        A plain module then trains alone; another backward pass of a wrapped or sharded model raises
        HookRunError. `stats()`, `plan()` and `state_dict()` still work. Does not communicate;
        repeated calls do nothing. The plugins call this at the end of `fit` and `train`.
        """
        self._unused.ended()
        self._source.close()
        self._hook.close()
        if self._shards is not None:
            self._shards.detach()

    def failed(self, error: BaseException) -> None:
        """End the run after `error`, without the warning that the hook had no effect.

        If another collective than the hook's has raised it, add which ranks have ended or hang.
        """
        self._unused.silence()
        with contextlib.suppress(HookRunError):  # the group was destroyed
            note_lost_ranks(error, self._source.group)

    @property
    def options(self) -> dict[str, Any]:
        """The current options, with `start_powerSGD_iter` as a number of steps."""
        return self._hook.status().options

    @property
    def members(self) -> "Members | None":
        """The machines, if they come and go (`attach(members=...)`); None otherwise."""
        return self._hook.members

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which backward passes only accumulate gradients.

        For a module that nothing wraps: like passes in DDP's `no_sync`, they do not count. The
        forward pass may be inside or outside. Raises HookConfigError if the model is wrapped in DDP
        or sharded by `fully_shard`, which have ways of their own.
        """
        return self._source.no_sync()

    @property
    def run_number(self) -> int | None:
        """Identifies the files of this run, equal on all ranks; None before the first backward
        pass, and for hooks without learned state.
        """
        return self._hook.status().run_number

    def plan(self) -> ModelPlan:
        """Return the plan of what is compressed, with a row per parameter, or for batched PowerSGD
        per bucket, once the first backward pass has shown the buckets.
        """
        plan = self._hook.plan()
        return plan if self._shards is None else self._shards.with_plan(plan)

    @plain_mode()
    def stats(self) -> dict[str, Any]:
        """Return the counters of this rank since `attach`.

        docs/working.md ("The counters of stats()") explains the keys. Bytes are the sizes of the
        tensors passed to collectives. A value is None if it is unknown (the bytes of a user's
        function) or does not exist for this hook. Synchronises with the accelerator if the outcome
        of recent steps is unread.
        """
        shards = None if self._shards is None else self._shards.stats()
        return statistics(self.name, self._hook, self._source) | {"shards": shards}

    @plain_mode()
    def norms(self) -> dict[str, float | None]:
        """Compute `residual_norm`, `gradient_norm` and `residual_over_gradient` on this rank.

        Each is a float or None, over the compressed parameters, or over all parameters for hooks
        without learned state, which have no residual. With `ranks_per_node`, over this rank's
        share, with the residual of the node's mean. Residuals are in units of the unscaled loss.
        Gradients are read from `.grad`, so call this between the backward pass (with a GradScaler:
        `unscale_` or the optimizer's step) and `zero_grad`.
        """
        with self._hook.residuals() as (residuals, factor, measured):
            every = self._source.gradients()
            gradients = {name: every[name] for name in every if name in measured}
            return norms(gradients, residuals, factor)

    @plain_mode()
    def state_dict(
        self, residual: str | None = None, *, gather: bool = False, joint: bool = True
    ) -> dict[str, Any]:
        """Return the hook's state for a checkpoint: step, Q, residuals, options, on the CPU.

        Args:
            residual: "per_rank", "mean", "drop" or "distributed"; None is the `save_residual` of
                `attach`. "per_rank": this rank's own residuals, without communication: save one
                file per rank. "mean": the mean over the ranks; *all ranks must call*. The residuals
                of every rank are set to the mean, so that this run and a run that resumes from the
                checkpoint stay bitwise equal. "drop": no residuals.
                "distributed": the mean, in a form that `torch.distributed.checkpoint` saves and
                loads, as in `dcp.save({"hook": hook})`; *all ranks must call*. Models sharded by
                `fully_shard` have this form only, with or without residuals.
            gather: with "per_rank", the residuals of all ranks; *all ranks must call*.
            joint: False if other ranks might not join this save (in signal handlers, after
                exceptions): nothing is communicated.

        Returns:
            Plain types and tensors, for `torch.save`. A joint save waits at most
            `joint_save_limit_s` seconds for the other ranks. If it fails, the payload has `"exact":
            False` and no residuals, and one warning is logged. This may be called from another
            thread; the payload never mixes two steps.
        """
        return self._saved.save(
            residual, gather=gather, joint=joint, limit_s=self.joint_save_limit_s
        )

    @plain_mode()
    def synchronize(self, *, optimizers: bool = False) -> bool:
        """Average the weights now, for example before a validation, if the hook averages weights.

        With hooks that average gradients this does nothing. *All ranks must call* this between two
        steps.

        Args:
            optimizers: also copy rank 0's optimizer state to all ranks, so that this run continues
                as a resumed run would. A joint `state_dict` does the same. Call one of them before
                you copy the state of the model or an optimizer.

        Returns:
            Whether all ranks took part within `joint_save_limit_s` seconds, after equal numbers of
            backward passes. If not, nothing has changed, and one warning is logged.
        """
        return self._hook.synchronize(self.joint_save_limit_s, optimizers=optimizers)

    @print_error_on_rank_zero()
    def load_state_dict(self, saved: dict[str, Any], strict: bool | None = None) -> None:
        """Load the result of `state_dict`. *All ranks must call* this between two steps.

        Everything is checked before anything changes. The saved `start_powerSGD_iter` replaces the
        current value. If `matrix_approximation_rank` has changed, the residuals are kept and Q is
        refitted. If the world size has changed, every rank gets the mean of the residuals. If any
        rank's residual is missing, all ranks start from zero residuals, with one warning. Tensors
        are copied, so training does not change `saved`.

        Args:
            strict: whether the state of another hook or model is an error; None: the `strict` of
                `attach`. If False, mismatched parameters start without learned state, and one
                warning lists them.

        Raises:
            PayloadError: `saved` is damaged or does not fit; nothing was changed. The message lists
                the mismatches.
        """
        self.prepare_load(saved, strict)()

    def prepare_load(self, saved: object, strict: bool | None = None) -> Callable[[], None]:
        """Check `saved`, and return a function that applies it; see `load_state_dict`."""
        with plain_mode():
            return plain_mode()(self._saved.prepare_load(saved, strict))
