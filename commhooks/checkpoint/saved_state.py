"""From a hook's memory to a checkpoint payload and back: PowerSGD's, and that of every other hook."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint import payload
from commhooks.checkpoint.checks import check_count, check_world_size, damaged, shown
from commhooks.checkpoint.plain_types import plain_types_problem
from commhooks.comm.counters import Stats
from commhooks.comm.joint_save import JointSave
from commhooks.compressors.powersgd import codec
from commhooks.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from commhooks.engine.state import Memory
from commhooks.errors import CommHookError, PayloadError
from commhooks.gradients.names import Names
from commhooks.hook.plan import ParameterPlan

logger = logging.getLogger(__name__)


class LowRankSavedState:
    """Saves and loads the memory of a `PowerSGDState` on this rank.

    Args:
        plans: the plan of every parameter; compressed are those that have a Q of their own.
    """

    not_begun_anew = ""
    """What `begin_anew` leaves alone, as the end of a sentence."""

    def __init__(
        self,
        hook: str,
        state: PowerSGDState,
        names: Names,
        group: dist.ProcessGroup,
        plans: Callable[[], list[ParameterPlan]],
    ) -> None:
        self._hook = hook
        self._state = state
        self._names = names
        self._group = group
        self._plans = plans
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._joint_save: tuple[int, JointSave] | None = None
        self._first_start = state.start_powerSGD_iter

    def begin_anew(self) -> None:
        """Forget everything, a start step that was loaded included."""
        self._adopt(Memory(), self._first_start)

    @property
    def step(self) -> int:
        return self._state._memory.step

    def save(self, residual: str, gather: bool, joint: bool, limit_s: float) -> dict[str, Any]:
        """See `CommHook.state_dict`."""
        pipeline = self._state._registration.pipeline if self._state._registration is not None else None
        with self._lock():
            # A signal handler may come here in the middle of a commit of its own thread.
            torn = pipeline is not None and pipeline.committing
            if pipeline is not None and not torn:
                pipeline.settle()
            memory = self._state._memory
            kind, exact = "none", not torn
            ranks: list[int] = []
            residuals: dict[str, Any] = {}
            if residual != "drop" and torn:
                self._warn_inexact("it was being written at that moment", self._rank)
            elif residual != "drop":
                kind, ranks, residuals, exact = self._collect(memory, residual, gather, joint, limit_s)
            return payload.build(self._target(), memory, kind, ranks, residuals, exact=exact)

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        """Check all of `content` and change nothing; the function that is returned takes it over."""
        memory = payload.read(content, self._target(), strict=strict)
        start = content["options"].get("start_powerSGD_iter", self._state.start_powerSGD_iter)
        check_count({"start_powerSGD_iter": start}, "start_powerSGD_iter", 0)
        if not self._state.use_error_feedback:
            memory.drop_residuals()
        self._drop_uncompressed(memory)
        return lambda: self._adopt(memory, start)

    def _drop_uncompressed(self, memory: Memory) -> None:
        """A residual that no step takes up again would be saved on and on, and added much later by another run."""
        plans = self._plans()  # none for batched PowerSGD, in which every parameter may have a residual
        dropped = [plan.name for plan in plans if not plan.compressed and plan.name in memory.residuals]
        for name in dropped:
            del memory.residuals[name]
        if dropped and self._rank == 0:
            logger.warning(
                "hook %s compresses these parameters no longer, so that the residuals saved for them are dropped: %s",
                self._hook,
                ", ".join(dropped),
            )

    def joint_save(self) -> JointSave | None:
        """None before the first backward pass, in which the ranks agree on a place in the store."""
        registration = self._state._registration
        if registration is None or registration.nonce is None:
            return None
        if self._joint_save is None or self._joint_save[0] != registration.nonce:
            self._joint_save = (registration.nonce, JointSave(self._group, registration.nonce))
        return self._joint_save[1]

    def _lock(self) -> contextlib.AbstractContextManager[Any]:
        registration = self._state._registration
        return registration.pipeline.lock if registration is not None else contextlib.nullcontext()

    def _collect(
        self, memory: Memory, residual: str, gather: bool, joint: bool, limit_s: float
    ) -> tuple[str, list[int], dict[str, Any], bool]:
        """(kind, ranks, residuals by name, exact) for the payload."""
        everyone = list(range(self._world_size))
        if residual == "per_rank" and not gather:
            if memory.residual_missing:
                # What was loaded without residuals is so on all ranks; what a commit left behind, on this one.
                self._warn_inexact("this rank has lost its own", 0 if memory.missing_was_said else self._rank)
                return "none", [], {}, False
            return "per_rank", [self._rank], {name: [r] for name, r in memory.residuals.items()}, True
        names = [name for name in self._names.known() if name in memory.residuals]
        if self._world_size == 1 or (memory.residuals_shared and not memory.residual_missing):
            # Nothing to exchange: each rank's residual is the mean.
            return "mean", everyone, {name: memory.residuals[name] for name in names}, True
        kind = "mean" if residual == "mean" else "per_rank"
        collected: dict[str, Any] = {}

        def collect(group: JointSave) -> None:
            for name in names:
                mine = memory.residuals[name]
                collected[name] = group.mean(mine) if kind == "mean" else group.gather(mine)

        saver = self.joint_save()
        if not joint:
            reason = "this rank saves on its own"
        elif saver is None:
            reason = "no backward pass has run since the hook was attached"
        else:
            reason = saver.run(memory.step, collect, limit_s)
        if reason:
            self._warn_inexact(reason, saver.speaker if joint and saver is not None else 0)
            return "none", [], {}, False
        if kind == "mean":
            for name in names:
                memory.residuals[name].copy_(collected[name])
            memory.residuals_shared = True
        return kind, everyone, collected, True

    def _warn_inexact(self, reason: str, speaker: int) -> None:
        """One warning, not one per rank: `speaker` is rank 0 where all ranks know, else a rank that does."""
        if self._rank != speaker:
            return
        logger.warning(
            "commhooks: hook %s was saved at step %s without residuals, because %s. The saved state is marked inexact: "
            "a run that resumes from it starts from residuals of zero.",
            self._hook,
            self.step,
            reason,
        )

    def _adopt(self, memory: Memory, start: int) -> None:
        state, registration = self._state, self._state._registration
        with self._lock():
            if registration is not None:
                # Steps that an accelerator has not told of yet belong to the memory that ends here.
                registration.pipeline.settle()
            own = state._memory
            for each in dataclasses.fields(Memory):
                setattr(own, each.name, getattr(memory, each.name))
            state._options = dataclasses.replace(state._options, start_powerSGD_iter=start)
            if registration is not None:
                registration.memory_replaced(state._options)

    def _target(self) -> payload.Target:
        plans = {plan.name: plan for plan in self._plans() if plan.compressed}
        seed = self._state.random_seed

        def refit(name: str) -> torch.Tensor:
            plan = plans[name]
            return codec.draw(seed, name, "Q", plan.rank, plan.m, torch.float64)

        return payload.Target(
            self._hook,
            dataclasses.asdict(self._state._options),
            self._names.known(),
            {name: plan.rank for name, plan in plans.items()},
            self._rank,
            self._world_size,
            refit=refit,
        )


class SimpleSavedState:
    """Saves and loads the step of any other hook, and its state if that has `state_dict` and `load_state_dict`."""

    def __init__(
        self, hook: str, options: dict[str, Any], state: Any, stats: Stats, rank: int, world_size: int
    ) -> None:
        self._hook = hook
        self._options = options
        self._state = state
        self._stats = stats
        self._rank = rank
        self._world_size = world_size
        self._passes_before = 0

    def begin_anew(self) -> None:
        """Count from 0 again. A state of the user's own stays as it is: nobody but its owner could reset it."""
        self._passes_before = -self._stats.backward_passes

    @property
    def not_begun_anew(self) -> str:
        """What `begin_anew` leaves alone, as the end of a sentence."""
        return f"; its hook_state ({type(self._state).__name__}) stays as it is" if self.saves_state else ""

    @property
    def step(self) -> int:
        """All synchronised backward passes, those before a resume included."""
        return self._passes_before + self._stats.backward_passes

    @property
    def saves_state(self) -> bool:
        return all(callable(getattr(self._state, name, None)) for name in ("state_dict", "load_state_dict"))

    def save(self, residual: str, gather: bool, joint: bool, limit_s: float) -> dict[str, Any]:
        """See `CommHook.state_dict`; there are no residuals."""
        return {
            "format": "commhooks",
            "version": payload.VERSION,
            "hook": self._hook,
            "options": dict(self._options),
            "step": self.step,
            "world_size": self._world_size,
            "hook_state": self._own_state(),
        }

    def _own_state(self) -> Any:
        """What the user's state gives to save; None, with a warning, if a checkpoint could not give it back."""
        if not self.saves_state:
            return None
        saved = self._state.state_dict()
        problem = plain_types_problem(saved)
        if problem is None:
            return saved
        logger.warning(
            "the state_dict of hook %s's state is not saved: %s. torch.load(weights_only=True) would refuse the whole "
            "checkpoint; give it tensors and plain types only.",
            self._hook,
            problem,
        )
        return None

    def _load_own_state(self, saved: Any) -> None:
        try:
            self._state.load_state_dict(saved)
        except CommHookError:
            raise
        except Exception as error:
            raise PayloadError(
                f"load_state_dict of hook {self._hook!r}'s state ({type(self._state).__name__}) refused the saved "
                f"hook_state ({type(error).__name__}: {shown(error)}). Whether it has changed anything, only its code "
                "tells; the step is as it was"
            ) from error

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        """Check `content` as far as it is ours; the function that is returned takes it over."""
        check_world_size(content)
        if "hook_state" not in content:
            raise damaged("there is no 'hook_state', not even None")
        step, saved = content["step"], content["hook_state"]
        kind = type(self._state).__name__
        if saved is not None and not self.saves_state:
            text = f"the checkpoint holds a state of hook {self._hook!r}, but its hook_state now ({kind}) has no "
            text += "load_state_dict"
            if strict:
                raise PayloadError(f"{text}; strict=False loads the step and leaves that state out")
            saved = None
            problem = f"{text}: it is left out (strict=False)"
        elif saved is None and self.saves_state:
            problem = f"the checkpoint holds no state of hook {self._hook!r}: its hook_state ({kind}) stays as it is"
        else:
            problem = ""
        if problem and self._rank == 0:
            logger.warning(problem)

        def adopt() -> None:
            if saved is not None:
                self._load_own_state(saved)
            self._passes_before = step - self._stats.backward_passes

        return adopt
