"""`CommHook`: the user's handle on an attached hook."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from commhooks.checkpoint.distributed import from_distributed, is_distributed, to_distributed
from commhooks.checkpoint.payload import REPLICAS_EQUAL, check_header, inexact
from commhooks.comm.counters import has_clock
from commhooks.comm.groups import is_logging_rank, note_lost_ranks
from commhooks.errors import (
    HookConfigError,
    HookRunError,
    PayloadError,
    log_summary,
    logger_of,
    print_error_on_rank_zero,
    shown,
)
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.source import GradientSource, HookCallbacks, PassListener
from commhooks.hook.late_parameters import LateParameters, warn_of_unsharded
from commhooks.hook.protocol import Hook
from commhooks.hook.replica_check import ReplicaCheck
from commhooks.hook.unused import UnusedWarning
from commhooks.plan import ModelPlan
from commhooks.report import norms
from commhooks.request import SAVE_RESIDUAL, HookRequest

if TYPE_CHECKING:
    from commhooks.members.members import Members

logger = logger_of(__name__)

JOINT_SAVE_LIMIT_S = 60.0


class CommHook:
    """Represents a communication hook registered by `commhooks.attach`. `stats()` and `plan()` also
    work after the model was deleted.

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
        self._request, self._hook, self._source, self._shards = request, hook, source, shards
        self._rank, self._world_size = source.group.rank(), source.group.size()
        self._logs = is_logging_rank(source.group, source.shard_group)
        logs_use = self._logs and self._world_size > 1
        self._unused = UnusedWarning(request.name, hook, source.stepped(), logs=logs_use)
        self._quiet = self._warned_of_copies = False

    def __repr__(self) -> str:
        module = self._source.module
        model = (
            f"attached to {type(module).__name__}" if module is not None else "its model is gone"
        )
        model = "detached" if self.detached else model
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        wrapper = (
            f", wrapper={self._request.wrapper!r}" if self._request.wrapper is not None else ""
        )
        place = f"rank {self._rank} of {self._world_size}"
        return f"<CommHook({self.name!r}{options}{wrapper}), {model}, {place}>"

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
        """Warn if the training ends after `passes` further backward passes, before the hook
        begins.
        """
        self._unused.will_end(passes)

    def _register(self, state: Any, on_unused: Callable[[str], None] | None) -> None:
        every = self._request.check_every
        listeners: list[PassListener] = [self._unused]
        listeners += [] if every is None else [ReplicaCheck(self._source, self._hook, every)]
        if self._logs and self._source.shard_group is not None:
            warn_of_unsharded(self._source.not_averaged())
        elif self._logs and (self._world_size > 1 or self.members is not None):
            listeners.append(LateParameters(self._source))
        hook = self._hook
        listeners += hook.listeners(logs=self._logs)
        self._source.register(
            HookCallbacks(self.name, hook.run, hook.end_pass, self, listeners, self._begun), state
        )
        self._unused.callback = on_unused
        # fully_shard calls a hook wherever it reduces
        self._unused.begin(self._source.stepped() if self._source.from_ddp else ())

    def _begun(self) -> None:
        self._unused.after_first_pass()
        if self._quiet or not self._logs:
            return
        if self._shards is not None:
            log_summary(self._shards.summary())
        found, use, wrapper = self._hook.summary(), self._hook.status().use, self._request.wrapper
        about = f"{self.name} ({'; '.join(found.details)})" if found.details else self.name
        effect = ", ".join(
            each for each in (found.effect, wrapper and f"{wrapper} on the wire") if each
        )
        if found.alone is None:
            return
        if self._world_size == 1 and self.members is None:
            unit = "rank" if self._source.shard_group is None else "replica"
            effect = f"there is one {unit}, so nothing is sent{found.alone}"
        elif use is not None and use.plain:
            effect = f"plain all-reduce until step {use.begins}{use.or_later}, then {effect}"
        log_summary(f"{about}: {effect}" if effect else about)
        for warning in found.warnings:
            logger.warning("%s", warning)

    @plain_mode()
    def detach(self) -> None:
        """Remove the hook from a model sharded by `fully_shard`, so that another hook can be
        attached. Every rank must call this between two backward passes. Without a hook, gradients
        are not averaged over the replicas. A hook that averages weights averages them once more
        (`synchronize`).

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
        """End the training: free the buffers, move the learned state to the host, and remove the
        hook from a model sharded by `fully_shard`. `stats()`, `plan()` and `state_dict()` still
        work; another backward pass raises HookRunError. Does not communicate; repeated calls do
        nothing. The plugins for Lightning and transformers call this at the end of each training.
        """
        self._unused.ended()
        self._source.close()
        self._hook.close()
        if self._shards is not None:
            self._shards.detach()

    def failed(self, error: BaseException) -> None:
        """End the training after `error`, without the warning that the hook had no effect. If
        another collective than the hook's has raised it, add to it which ranks have ended or hang.
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
        members: Members | None = self._hook.members
        return members

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which backward passes of a module that nothing wraps only
        accumulate gradients: like passes in DDP's `no_sync`, they do not count. The forward pass
        may be inside or outside.

        Raises:
            HookConfigError: the model is wrapped in DDP or sharded by `fully_shard`, which have
                ways of their own.
        """
        return self._source.no_sync()

    @property
    def run_number(self) -> int | None:
        """A random number, equal on all ranks, that identifies the files of this run. None before
        the first backward pass, and for hooks without learned state.
        """
        return self._hook.status().run_number

    def plan(self) -> ModelPlan:
        """Return the plan of what is compressed, with one row per parameter. For batched PowerSGD
        there is one row per bucket, and the buckets are known after the first backward pass.
        """
        plan = self._hook.plan()
        return plan if self._shards is None else self._shards.with_plan(plan)

    @plain_mode()
    def stats(self) -> dict[str, Any]:
        """Return the counters of this rank since `attach`. Bytes are the sizes of the tensors
        passed to collectives. Synchronises with the accelerator if the outcome of recent steps is
        unread. A value is None if it is unknown (the bytes of a user's function) or does not exist
        for this hook:

        - `so_far`: the counters that a checkpoint holds, including earlier runs.
        - `kernel`: "native" for a native kernel, "torch" otherwise.
        - `chosen`, `chosen_at`: for "auto", the chosen hook, and the step at which it was chosen.
        - `step_in_round`: for hooks that average weights, the number of steps in the current round.
          Their `step` and `nonfinite_steps` count outer steps: committed, and discarded.
        - `members`: with live membership, the number of machines in the current round.
        - `outer_gradient_norm`, `outer_gradient_cosine`: the norm of the latest outer gradient, and
          its cosine with the previous outer gradient, computed from every 64th element.
        - `codec_s`: seconds inside the hook without waiting. `waiting_s`: seconds of waiting for
          collectives and slower ranks; for hooks without learned state, from the last hook call to
          the completion of the last future. Measured on the host; on CUDA by events; None on other
          accelerators. The small collectives after a start or a load do not count.
        """
        status, found = self._hook.status(), self._hook.stats()
        c, known, outcomes = self._hook.counters, status.counts_bytes, status.counts_outcomes
        parameters = self._source.names.named_parameters().values()
        clocks, timed = c.clocks, known and all(has_clock(p.device) for p in parameters)
        clocks.collect(wait=True)
        counted: dict[str, Any] = {
            "hook": self.name,
            "kernel": found.get("kernel"),
            "chosen": found.get("chosen"),
            "chosen_at": found.get("chosen_at"),
            "step": found["step"],
            "step_in_round": found.get("step_in_round"),
            "members": found.get("members"),
            "outer_gradient_norm": found.get("outer_gradient_norm"),
            "outer_gradient_cosine": found.get("outer_gradient_cosine"),
            "backward_passes": c.backward_passes,
            "compressed_steps": c.compressed_steps if outcomes else None,
            "nonfinite_steps": c.nonfinite_steps if outcomes else None,
            "collectives": c.collectives if known else None,
            "collectives_last_pass": c.last_pass.collectives if known else None,
            "bytes_sent": c.bytes_sent if known else None,
            "bytes_sent_last_pass": c.last_pass.bytes_sent if known else None,
            "bytes_inside_nodes": c.bytes_inside_nodes if known else None,
            "bytes_uncompressed": c.bytes_uncompressed,
            "compression_rate": (
                c.bytes_uncompressed / c.bytes_sent if known and c.bytes_sent else None
            ),
            "codec_s": clocks.total.codec_s if timed else None,
            "codec_s_last_pass": clocks.last_pass.codec_s if timed else None,
            "waiting_s": clocks.total.waiting_s if timed else None,
            "waiting_s_last_pass": clocks.last_pass.waiting_s if timed else None,
            "handshakes": c.handshakes,
            "last_issued": c.last_issued or None,
        }
        so_far = {
            name: None if counted[name] is None else count for name, count in c.cumulative().items()
        }
        shards = None if self._shards is None else self._shards.stats()
        return counted | {"so_far": so_far, "shards": shards}

    @plain_mode()
    def norms(self) -> dict[str, float | None]:
        """Compute `residual_norm`, `gradient_norm` and `residual_over_gradient` on this rank, each
        a float or None, over the compressed parameters, or over all parameters for hooks without
        learned state, which have no residual. With `ranks_per_node`, over this rank's share, with
        the residual of the node's mean.

        Residuals are in units of the unscaled loss. Gradients are read from `.grad`, so call this
        between the backward pass (with a GradScaler: `unscale_` or the optimizer's step) and
        `zero_grad`.
        """
        with self._hook.residuals() as (residuals, factor, measured):
            gradients = {
                name: each for name, each in self._source.gradients().items() if name in measured
            }
            return norms(gradients, residuals, factor)

    @plain_mode()
    def state_dict(
        self, residual: str | None = None, *, gather: bool = False, joint: bool = True
    ) -> dict[str, Any]:
        """Return the hook's state for a checkpoint: step, Q, residuals, options. Tensors are on the
        CPU.

        Args:
            residual: "per_rank", "mean", "drop" or "distributed"; None is the `save_residual` of
                `attach`. "per_rank": this rank's own residuals, without communication: save one
                file per rank. "mean": the mean over the ranks; *all ranks must call*. The residuals
                of every rank are set to the mean, so that this run and a run that resumes from the
                checkpoint stay bitwise equal. "drop": no residuals.
                "distributed": the mean, in a form that `torch.distributed.checkpoint` saves and
                loads, as in `dcp.save({"hook": hook})`; *all ranks must call*. Models sharded by
                `fully_shard` have this form only, with or without residuals.
            gather: with "per_rank", the residuals of all ranks in one payload; *all ranks must
                call*.
            joint: pass False if other ranks might not join this save (in signal handlers, after
                exceptions); then nothing is communicated.

        Returns:
            Plain types and tensors, for `torch.save`. A joint save waits at most
            `joint_save_limit_s` seconds for the other ranks. If it fails, the payload has `"exact":
            False` and no residuals, and one warning is logged. This may be called from another
            thread; the payload never mixes two steps.
        """
        sharded = self._source.shard_group is not None
        if residual is None:
            residual = (
                "distributed" if sharded and self._request.form != "drop" else self._request.form
            )
        choices = ("distributed", "drop") if sharded else (*SAVE_RESIDUAL, "distributed")
        if residual not in choices:
            raise HookConfigError(
                f"residual={residual!r}; expected one of {', '.join(map(repr, choices))}"
            )
        if residual == "distributed" or sharded:
            return self._distributed_state(residual, joint)
        return self._hook.checkpointer.save(
            residual, gather=gather, joint=joint, limit_s=self.joint_save_limit_s
        )

    def _distributed_state(self, residual: str, joint: bool) -> dict[str, Any]:
        if not joint:
            raise HookConfigError(
                "joint=False with a state for torch.distributed.checkpoint: it needs all ranks, as"
                " dcp.save does"
            )
        kept = self._hook.checkpointer.kept_fields(self._source)
        if residual == "drop":
            kept.pop("residual", None)
        agreed_before = self._hook.status().replicas_agree
        form = "mean" if "residual" in kept else "drop"
        saved = self._hook.checkpointer.save(form, limit_s=self.joint_save_limit_s)
        if not agreed_before and self._hook.status().replicas_agree:  # this save ended a round
            if saved["exact"]:
                saved = inexact(
                    saved,
                    "the save has ended a round: copies of the model's or an optimizer's state that"
                    " were made before it (cpu_offload=True) are older than the hook's state",
                )
            if self._logs and not self._warned_of_copies:
                self._warned_of_copies = True
                logger.warning(
                    "hook %s: this save has ended a round and is marked inexact, because copies of"
                    " the model's or an optimizer's state that were made before it"
                    " (cpu_offload=True) are older than the hook's state. Call"
                    " hook.synchronize(optimizers=True) before you copy and save.",
                    self.name,
                )
        return to_distributed(saved, kept, self._source)

    @plain_mode()
    def synchronize(self, *, optimizers: bool = False) -> bool:
        """Average the weights now, for example before a validation, if the hook averages weights
        once in several steps (`diloco`, `local_sgd`). With other hooks this does nothing. *All
        ranks must call* this between two steps.

        Args:
            optimizers: also copy rank 0's optimizer state to all ranks, so that this run continues
                as a resumed run would. A joint `state_dict` does the same. Call one of them before
                you copy the state of the model or an optimizer.

        Returns:
            Whether all ranks took part within `joint_save_limit_s` seconds. If False, nothing has
            changed, and one warning is logged.
        """
        return self._hook.synchronize(self.joint_save_limit_s, optimizers=optimizers)

    @print_error_on_rank_zero()
    def load_state_dict(self, saved: dict[str, Any], strict: bool | None = None) -> None:
        """Load the result of `state_dict`. *All ranks must call* this before the next backward
        pass.

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
        """Check `saved` without changing anything, and return a function that applies it; see
        `load_state_dict`.
        """
        with plain_mode():
            return plain_mode()(self._checked_load(saved, strict))

    def _checked_load(self, saved: object, strict: bool | None) -> Callable[[], None]:
        strict = self._request.strict if strict is None else strict
        content = check_header(
            from_distributed(saved, self._source) if is_distributed(saved) else saved
        )
        if not strict and self._logs:
            log_summary(
                f"{self.name}: strict=False: this load leaves out what does not fit, also of a"
                " wrong checkpoint. Remove strict=False when this run has saved again"
            )
        if not content.get(REPLICAS_EQUAL, True) and self._logs:
            logger.warning(
                "the checkpoint was saved by hook %s, which averages nothing: the ranks had drifted"
                " apart, and the saved weights are one rank's.",
                shown(content["hook"]),
            )
        checkpointer = self._hook.checkpointer
        if content["hook"] == self.name:
            take_over = checkpointer.prepare_load(content, strict)

            def resume() -> None:
                take_over()
                if self._logs and content["step"] > 0:
                    resumed = checkpointer.resumed(content)
                    log_summary(
                        f"{self.name} resumed at {checkpointer.step_is} {content['step']}{resumed}"
                    )

            return resume
        text = (
            f"the saved state is of hook {shown(content['hook'])}, but this hook is {self.name!r}"
        )
        if strict:
            raise PayloadError(
                f"{text}. Attach the saved hook to continue with its memory, or pass strict=False,"
                " with hook=... or to the load, to begin this one with fresh memory"
            )
        if self._logs:
            logger.warning(
                "%s: it begins with fresh memory (strict=False)%s",
                text,
                checkpointer.not_begun_anew,
            )
        return checkpointer.begin_anew
