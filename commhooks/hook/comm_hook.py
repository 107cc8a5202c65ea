"""`CommHook`: a hook that is attached to a model, and the user's handle on it."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from commhooks.checkpoint.distributed import to_distributed
from commhooks.comm.counters import has_clock
from commhooks.errors import HookConfigError, HookRunError, logger_of, reason_first
from commhooks.gradients.source import GradientSource
from commhooks.hook.checked_state import checked_state
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.norms import measure
from commhooks.hook.runner import Runner
from commhooks.request import SAVE_RESIDUAL, HookRequest

logger = logger_of(__name__)

JOINT_SAVE_LIMIT_S = 60.0


class CommHook:
    """A registered communication hook, made by `commhooks.attach`. `stats()` and `plan()` remain usable after the model
    was deleted.

    Attributes:
        name: name of the hook.
        detached: it was taken off its model; see `detach`.
        joint_save_limit_s: seconds that a joint save waits for the other ranks before it continues without residuals.
    """

    def __init__(self, request: HookRequest, runner: Runner, source: GradientSource) -> None:
        self.name = request.name
        self.joint_save_limit_s = JOINT_SAVE_LIMIT_S
        self.detached = False
        self._request = request
        self._runner = runner
        self._source = source
        self._warned_of_copies = False
        weakref.finalize(self, _at_exit, weakref.ref(self))

    def __del__(self) -> None:
        self._runner.ended()  # with the model

    def __repr__(self) -> str:
        module = self._source.module
        model = f"attached to {type(module).__name__}" if module is not None else "its model is gone"
        model = "detached" if self.detached else model
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        wrapper = f", wrapper={self._request.wrapper!r}" if self._request.wrapper is not None else ""
        place = f"rank {self._runner.rank} of {self._runner.world_size}"
        return f"<CommHook({self.name!r}{options}{wrapper}), {model}, {place}>"

    def __reduce__(self) -> NoReturn:
        """Called for copies and pickles."""
        raise HookRunError(
            "a CommHook cannot be copied or pickled, because it belongs to one model and its process group: "
            "save hook.state_dict(), and load that into the hook of another model"
        )

    def quiet(self) -> None:
        """Log neither a summary at the first backward pass nor that the training does not use the hook, for callers
        such as the doctor."""
        self._runner.quiet()

    def will_end(self, passes: int) -> None:
        """Log a warning if the training ends after so many further backward passes and the hook begins later."""
        self._runner.will_end(passes)

    def detach(self) -> None:
        """Take the hook off a model sharded by `fully_shard`, between two backward passes, so that another one can be
        attached. Every rank must call this. Afterwards gradients are not averaged between the replicas. A hook that
        averages weights does so once more (`synchronize`).

        Raises:
            AttachError: the model is a DDP model, which keeps its hook for life.
        """
        self._source.unregister()
        self.synchronize()
        self._runner.unused.silence()
        self._runner.stop()
        self.detached = True

    def close(self) -> None:
        """Free what only backward passes need, at the end of a training: the buffers, and on a model sharded by
        `fully_shard` the place in it. What was learned moves to the host. `stats()`, `plan()` and `state_dict()` remain
        usable; a further backward pass raises HookRunError. Nothing is communicated, so no rank waits for another one.
        Repeated calls do nothing.

        The plugins for Lightning and transformers call this at the end of each training. Otherwise all of this is freed
        with the model.
        """
        self._runner.close()

    @property
    def options(self) -> dict[str, Any]:
        """The hook's options, with `start_powerSGD_iter` as a number of steps."""
        return self._runner.options

    @property
    def run_number(self) -> int | None:
        """A random number that the ranks agree on in the first backward pass, by which the files of one run can be told
        from those of another. None before it, and for hooks that learn nothing."""
        return self._runner.run_number

    def plan(self) -> ModelPlan:
        """What is compressed and what is not: one row per parameter (for batched PowerSGD one per bucket, available
        after the first backward pass)."""
        return self._runner.plan()

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since the hook was attached. Bytes are those of the tensors passed to collectives.

        Synchronises with the accelerator if the outcome of recent steps is unread. For a user's hook bytes, seconds and
        the kernel are None, because they are unknown.

        `so_far`: a dict of those counters that go on in a run that resumes, with what the runs before it have counted.

        `chosen`: what the hook "auto" has chosen and is doing, `chosen_at`: since which step, None before it has
        decided. Both are None for other hooks.

        `step_in_round`, `outer_gradient_norm`, `outer_gradient_cosine`: of hooks that average weights once in a round
        of several steps, None for others: the steps of the round so far; of the latest outer step the norm of the outer
        gradient, and its cosine with the one before, from every 64th number. Their `step` and `nonfinite_steps` count
        outer steps: those that were committed and discarded.

        `kernel`: what the hook computes with: "native" for PowerSGD's native kernel, "torch" otherwise.

        `codec_s`: seconds inside the hook without waiting. `waiting_s`: seconds of waiting for collectives, including
        the delay of other ranks. Both are measured on the host, on CUDA by events on the device, and are None on other
        accelerators. Simple hooks return at once and DDP waits: their waiting time is that from the last hook call to
        the completion of the last future. The small collectives after a start or a load are not included.
        """
        runner = self._runner
        runner.settle()
        s, known, outcomes = runner.counters, runner.counts_bytes, runner.counts_outcomes
        clocks, timed = s.clocks, known and all(has_clock(p.device) for p in self._source.names.known().values())
        clocks.collect(wait=True)
        in_round, outer_norm, outer_cosine = runner.round
        counted: dict[str, Any] = {
            "hook": self.name,
            "kernel": runner.choice.kernel.name if known else None,
            "chosen": runner.chosen[0],
            "chosen_at": runner.chosen[1],
            "step": runner.saved_state.step,
            "step_in_round": in_round,
            "outer_gradient_norm": outer_norm,
            "outer_gradient_cosine": outer_cosine,
            "backward_passes": s.backward_passes,
            "compressed_steps": s.compressed_steps if outcomes else None,
            "nonfinite_steps": s.nonfinite_steps if outcomes else None,
            "collectives": s.collectives if known else None,
            "collectives_last_pass": s.last_pass.collectives if known else None,
            "bytes_sent": s.bytes_sent if known else None,
            "bytes_sent_last_pass": s.last_pass.bytes_sent if known else None,
            "bytes_inside_nodes": s.bytes_inside_nodes if known else None,
            "bytes_uncompressed": s.bytes_uncompressed,
            "compression_rate": s.bytes_uncompressed / s.bytes_sent if known and s.bytes_sent else None,
            "codec_s": clocks.total.codec_s if timed else None,
            "codec_s_last_pass": clocks.last_pass.codec_s if timed else None,
            "waiting_s": clocks.total.waiting_s if timed else None,
            "waiting_s_last_pass": clocks.last_pass.waiting_s if timed else None,
            "handshakes": s.handshakes,
            "last_issued": s.last_issued or None,
        }
        so_far = {name: None if counted[name] is None else count for name, count in s.cumulative().items()}
        return counted | {"so_far": so_far}

    def norms(self) -> dict[str, float | None]:
        """`residual_norm`, `gradient_norm` and `residual_over_gradient` of this rank, over the parameters that the hook
        compresses (over all parameters for hooks without learned state, which have no residual). With `ranks_per_node`
        over those of this rank's share, with the residual of the node's mean. Computed by this call; steps have no
        extra cost.

        Residuals are in units of the unscaled loss. Gradients are read from `.grad`: call this after the backward pass
        (with a GradScaler: after `unscale_` or the optimizer's step) and before the gradients are zeroed. A norm is
        None if there is nothing to measure.
        """
        chosen = self._runner.measured(set(self._source.names.known()))
        with self._runner.residuals() as (residuals, factor):
            gradients = {name: each for name, each in self._source.gradients().items() if name in chosen}
            return measure(gradients, residuals, factor)

    def state_dict(self, residual: str | None = None, *, gather: bool = False, joint: bool = True) -> dict[str, Any]:
        """The state of the hook for a checkpoint: step, Q, residuals, options; tensors are on the CPU.

        Args:
            residual: "per_rank", "mean", "drop" or "distributed"; None is the `save_residual` of `attach`.
                "per_rank": this rank's own residuals, without communication: save one file per rank.
                "mean": the mean over the ranks; *all ranks must call*. It also sets every rank's residuals to that
                mean, so that this run and a run that resumes from the checkpoint stay bitwise equal.
                "drop": no residuals.
                "distributed": the mean, in a form that `torch.distributed.checkpoint` saves and loads, as in
                `dcp.save({"hook": hook})`; *all ranks must call*. Models sharded by `fully_shard` have this form only,
                with or without residuals.
            gather: with "per_rank", the residuals of all ranks in one payload; *all ranks must call*.
            joint: False if other ranks may not take part (signal handlers, exceptions): nothing is communicated.

        Returns:
            Plain types and tensors, for `torch.save`. A joint save waits at most `joint_save_limit_s` seconds for the
            other ranks. If it fails, the payload has `"exact": False` and no residuals, and one warning is logged.
            Called from another thread than the training's, it waits for a running commit, so that it never mixes two
            steps.
        """
        sharded = self._source.shard_group is not None
        if residual is None:
            residual = "distributed" if sharded and self._request.form != "drop" else self._request.form
        choices = ("distributed", "drop") if sharded else (*SAVE_RESIDUAL, "distributed")
        if residual not in choices:
            raise HookConfigError(f"residual={residual!r}; expected one of {', '.join(map(repr, choices))}")
        if residual == "distributed" or sharded:
            return self._distributed_state(residual, joint)
        joint = joint and self.synchronize(optimizers=True)
        limit_s = self.joint_save_limit_s
        content = self._runner.saved_state.save(residual, gather=gather, joint=joint, limit_s=limit_s)
        return self._runner.vouched(content, together=joint)

    def _distributed_state(self, residual: str, joint: bool) -> dict[str, Any]:
        if not joint:
            raise HookConfigError(
                "joint=False with a state for torch.distributed.checkpoint: it needs all ranks, as dcp.save does"
            )
        in_round = not self._runner.replicas_agree
        together = self.synchronize(optimizers=True)
        if in_round and together and self._runner.is_logging_rank and not self._warned_of_copies:
            self._warned_of_copies = True
            logger.warning(
                "hook %s: this save has ended a round. Copies of the model's or an optimizer's state that were made "
                "before it (cpu_offload=True) are older than the hook's state: call hook.synchronize(optimizers=True) "
                "before you copy. References need nothing.",
                self._request.name,
            )
        kept = self._runner.kept_fields(self._source.whole)
        if residual == "drop":
            kept.pop("residual", None)
        form = "mean" if "residual" in kept else "drop"
        saved = self._runner.saved_state.save(form, limit_s=self.joint_save_limit_s)
        saved = self._runner.vouched(saved, together=together)
        return to_distributed(saved, kept, self._source)

    def synchronize(self, *, optimizers: bool = False) -> bool:
        """For hooks that average weights once in several steps (`diloco`, `local_sgd`): average them now, so that the
        model is the same on all ranks, as before a validation. *All ranks must call* this, between two steps. Other
        hooks do nothing.

        Args:
            optimizers: let all ranks go on with the optimizers' state of rank 0, too, as a run that resumes does. A
                joint `state_dict` does it: call that, or this, before you copy the state of the model or of an
                optimizer.

        Returns:
            Whether all ranks took part, for which this waits at most `joint_save_limit_s` seconds. If not, nothing has
            changed, and one warning is logged.
        """
        return self._runner.synchronize(self.joint_save_limit_s, optimizers=optimizers)

    @reason_first()
    def load_state_dict(self, saved: dict[str, Any], strict: bool | None = None) -> None:
        """Load the result of `state_dict`. *All ranks must call* this, before the next backward pass.

        All or nothing: everything is checked before anything changes. The saved `start_powerSGD_iter` replaces the
        current one. After a change of `matrix_approximation_rank` the residuals are kept and Q is refitted. After a
        change of the world size every rank gets the mean of the residuals. If the residual of any rank is missing, all
        ranks start from residuals of zero, with one warning. Tensors are copied: training does not change `saved`.

        Args:
            strict: whether a state of another hook or model is an error (default: the `strict` of `attach`). If not,
                mismatched parameters start with empty learned state, and one warning lists them.

        Raises:
            PayloadError: `saved` is damaged or does not fit; nothing was changed. The message lists the mismatches.
        """
        self.prepare_load(saved, strict)()

    def prepare_load(self, saved: object, strict: bool | None = None) -> Callable[[], None]:
        """Check all of `saved` without changing anything. Returns a function that applies it. See `load_state_dict`.

        Raises:
            PayloadError: `saved` is damaged or does not fit.
        """
        return functools.partial(
            self._runner.load, checked_state(saved, self._runner, self._request, self._source, strict)
        )


def _at_exit(hook: "weakref.ref[CommHook]") -> None:
    """Called at the end of the interpreter; also when the hook is deleted, when `hook` gives None."""
    alive = hook()
    if alive is None:
        return
    if getattr(sys, "last_value", None) is not None:  # an exception ends the interpreter
        alive.quiet()
    alive._runner.ended()
