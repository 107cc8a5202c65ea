"""`CommHook`: a hook that is attached to a DDP model, and the user's handle on it."""

import contextlib
import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks import codec, payload
from commhooks.after_backward import run_after_backward
from commhooks.config import HookConfig, PowerSGD
from commhooks.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from commhooks.errors import HookConfigError, HookRunError, PayloadError
from commhooks.joint_save import JointSave
from commhooks.memory import Memory
from commhooks.names import GivenNames
from commhooks.pipeline import forbid_uneven_division
from commhooks.plan import ModelPlan, ParameterPlan, plan_parameter
from commhooks.spec import HookSpec
from commhooks.stats import Stats
from commhooks.wire import WIRE_DTYPES

logger = logging.getLogger(__name__)

JOINT_SAVE_LIMIT_S = 60.0
_NO_BUCKET_YET = sys.maxsize


class CommHook:
    """A registered communication hook, made by `commhooks.attach`. `stats()` and `plan()` outlive the model.

    Attributes:
        name: of the hook.
        options: its options, with `start_powerSGD_iter` as a number of steps.
        joint_save_limit_s: seconds that a save waits for the other ranks before it goes on without residuals.
    """

    def __init__(
        self,
        spec: HookSpec,
        config: HookConfig | None,
        state: Any,
        function: Callable[..., Any],
        ddp_model: DistributedDataParallel,
        names: GivenNames,
        group: dist.ProcessGroup,
        wire_itemsize: int | None,
    ) -> None:
        self.name = spec.name
        self.options: dict[str, Any] = dataclasses.asdict(config) if config is not None else dict(spec.options)
        self.joint_save_limit_s = JOINT_SAVE_LIMIT_S
        self._spec = spec
        self._config = config
        self._state = state
        self._function = function
        self._names = names
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ddp_model = weakref.ref(ddp_model)
        self._low_rank = state if isinstance(state, PowerSGDState) else None
        self._stats = self._low_rank._stats if self._low_rank is not None else Stats()
        self._counts_bytes = config is not None
        self._wire_itemsize = wire_itemsize
        self._joint_save: tuple[int, JointSave] | None = None
        self._announced = False
        self._passes_before = 0
        # Buckets come in order: one that is not beyond the last one begins another pass.
        self._last_index = _NO_BUCKET_YET
        self._sparse = {
            id(module.weight)
            for module in ddp_model.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        }

    # ---- what DDP calls ----------------------------------------------------------------------------------------------

    def _run(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            raise HookRunError(
                "this hook was called without a GradBucket: compiled DDP with optimize_ddp='python_reducer' is not "
                "supported; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'"
            )
        if bucket.index() <= self._last_index:
            ddp_model = self._ddp_model()
            if ddp_model is not None:
                forbid_uneven_division(ddp_model)
            if self._low_rank is None:
                self._stats.begin_pass()
        self._last_index = bucket.index()
        if self._low_rank is None:
            self._count(bucket)
        future: torch.futures.Future[torch.Tensor] = self._function(state, bucket)
        # `Work.get_future()` gives the base class, which has no public name (torch 2.13).
        if not isinstance(future, torch._C.Future):
            raise HookRunError(
                f"hook {self.name!r} returned a {type(future).__name__}; it must return a torch.futures.Future that "
                "holds the reduced bucket, for example "
                "dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])"
            )
        if bucket.is_last():
            self._end_pass()
        else:  # the last one may never come: DDP can be told to skip buckets that no rank uses
            run_after_backward(self._end_pass)
        return future

    def _end_pass(self) -> None:
        self._last_index = _NO_BUCKET_YET
        if not self._announced:
            self._announce()

    def _count(self, bucket: dist.GradBucket) -> None:
        """PowerSGD counts for itself; the simple hooks send one all-reduce per bucket."""
        buffer = bucket.buffer()
        numel = buffer._values().numel() if buffer.is_sparse else buffer.numel()
        self._stats.bytes_uncompressed += numel * buffer.element_size()
        if not self._counts_bytes or self._wire_itemsize == 0:
            return
        itemsize = buffer.element_size()
        if not buffer.is_sparse:
            widths = [itemsize, self._wire_itemsize or itemsize]
            if self._spec.wrapper is not None:
                widths.append(WIRE_DTYPES[self._spec.wrapper].itemsize)
            itemsize = min(widths)
        self._stats.sent(numel, itemsize)

    def _announce(self) -> None:
        self._announced = True
        if self._rank != 0:
            return
        text = f"commhooks: {self.name}"
        if isinstance(self._config, PowerSGD):
            rank, start = self._config.matrix_approximation_rank, self._config.start_powerSGD_iter
            text += f" (rank {rank}, from step {start}): {self.plan().summary()}"
        elif self._counts_bytes:
            sent, before = self._stats.last_pass.bytes_sent, self._stats.bytes_uncompressed
            text += f": {before / 1e6:.3f} MB -> {sent / 1e6:.3f} MB per step and rank"
        if self._spec.wrapper is not None:
            text += f", {self._spec.wrapper} on the wire"
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info(text)
        else:
            # Nobody has set up logging, and whether compression acts must not be a secret.
            print(text, file=sys.stderr, flush=True)

    # ---- what users call ---------------------------------------------------------------------------------------------

    def plan(self) -> ModelPlan:
        """What is compressed and what is not, per parameter (per bucket for batched PowerSGD, after the first pass)."""
        start = self._low_rank.start_powerSGD_iter if self._low_rank is not None else 0
        wire = WIRE_DTYPES[self._spec.wrapper] if self._spec.wrapper is not None else None
        if self._low_rank is not None and self._batched():
            registration = self._low_rank._registration
            plans = registration.plan().parameters if registration is not None else ()
            return ModelPlan(self.name, plans, wire, start)
        return ModelPlan(self.name, tuple(self._plan_parameters()), wire or self._own_wire(), start)

    def stats(self) -> dict[str, Any]:
        """Counters since the hook was attached, this rank only. Bytes are those handed to all-reduce.

        Waits for the accelerator if it has not told yet which of the latest steps were finite. For a hook of the
        user's own the bytes are None: only it knows.
        """
        if self._low_rank is not None and self._low_rank._registration is not None:
            self._low_rank._registration.pipeline.settle()
        s = self._stats
        known = self._counts_bytes or self._low_rank is not None
        return {
            "hook": self.name,
            "step": self._low_rank._memory.step if self._low_rank is not None else self._simple_step(),
            "backward_passes": s.backward_passes,
            "compressed_steps": s.compressed_steps if self._low_rank is not None else None,
            "nonfinite_steps": s.nonfinite_steps if self._low_rank is not None else None,
            "collectives": s.collectives if known else None,
            "collectives_last_pass": s.last_pass.collectives if known else None,
            "bytes_sent": s.bytes_sent if known else None,
            "bytes_sent_last_pass": s.last_pass.bytes_sent if known else None,
            "bytes_uncompressed": s.bytes_uncompressed,
            "compression_rate": s.bytes_uncompressed / s.bytes_sent if known and s.bytes_sent else None,
            "handshakes": s.handshakes,
            "last_issued": s.last_issued or None,
        }

    def state_dict(self, residual: str | None = None, *, gather: bool = False, joint: bool = True) -> dict[str, Any]:
        """What a checkpoint needs to continue: step, Q, residuals, options; on the CPU or where the model is.

        Args:
            residual: "per_rank", "mean" or "drop"; None is the `save_residual` of `attach`.
                "per_rank": this rank's own residuals, no communication: save one file per rank.
                "mean": the mean over the ranks; *all ranks must call*. It also sets every rank's residuals to that
                mean, so that the run that saved and a run that resumes from it stay equal bit for bit.
                "drop": no residuals.
            gather: with "per_rank", the residuals of all ranks in one payload; *all ranks must call*.
            joint: False where other ranks may not take part (signal handlers, exceptions): nothing is communicated.

        Returns:
            Plain types and tensors, for `torch.save`. Where a joint save was not possible it is marked
            `"exact": False`, holds no residuals, and one warning says so; it waits `joint_save_limit_s` at most.
            From another thread than the training's it waits for a commit that is under way: it never mixes two steps.
        """
        residual = residual if residual is not None else self._spec.save_residual
        if residual not in payload.SAVE_RESIDUAL:
            raise HookConfigError(
                f"residual={residual!r}; expected one of {', '.join(map(repr, payload.SAVE_RESIDUAL))}"
            )
        if self._low_rank is None:
            return self._user_payload()
        pipeline = self._low_rank._registration.pipeline if self._low_rank._registration is not None else None
        with pipeline.lock if pipeline is not None else contextlib.nullcontext():
            # A signal handler may come here in the middle of a commit of its own thread.
            torn = pipeline is not None and pipeline.committing
            if pipeline is not None and not torn:
                pipeline.settle()
            memory = self._low_rank._memory
            kind, exact = "none", not torn
            ranks: list[int] = []
            residuals: dict[str, Any] = {}
            if residual != "drop" and not torn:
                kind, ranks, residuals, exact = self._collect(memory, residual, gather, joint)
            return payload.build(self._target(), memory, kind, ranks, residuals, exact=exact)

    def load_state_dict(self, saved: dict[str, Any], strict: bool | None = None) -> None:
        """Take over what `state_dict` returned. *All ranks must call*, before the next backward pass.

        All or nothing: everything is checked before anything changes. The saved `start_powerSGD_iter` wins. A changed
        rank keeps the residuals and refits Q. Another world size takes the mean of the residuals. If the residual of
        any rank is missing, all ranks start from residuals of zero, with one warning.

        Args:
            strict: whether a state of another hook or model is an error (default: the `strict` of `attach`); if not,
                what does not fit starts with fresh memory, and one warning lists it.

        Raises:
            PayloadError: nothing was changed; the text lists what does not fit.
        """
        self._prepare_load(saved, strict)()

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def _prepare_load(self, saved: object, strict: bool | None = None) -> Callable[[], None]:
        """Check all of `saved` and change nothing; the function that is returned takes it over."""
        strict = self._spec.strict if strict is None else strict
        content = payload.check_header(saved)
        if content["hook"] != self.name:
            text = f"the saved state is of hook {content['hook']!r}, this one is {self.name!r}"
            if strict:
                raise PayloadError(
                    f"{text}. Attach the saved hook to continue with its memory, or load with strict=False to begin "
                    "this one with fresh memory"
                )
            logger.warning("%s: it begins with fresh memory (strict=False)", text)
            return lambda: None
        if self._low_rank is None:
            return lambda: self._load_user_state(content)
        memory = payload.read(content, self._target(), strict=strict)
        start = content["options"].get("start_powerSGD_iter", self._low_rank.start_powerSGD_iter)
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise PayloadError(f"damaged hook state: options['start_powerSGD_iter'] is {start!r}")
        if not self._low_rank.use_error_feedback:
            memory.drop_residuals()
        return lambda: self._adopt(memory, start)

    def _collect(
        self, memory: Memory, residual: str, gather: bool, joint: bool
    ) -> tuple[str, list[int], dict[str, Any], bool]:
        """(kind, ranks, residuals by name, exact) for the payload."""
        everyone = list(range(self._world_size))
        if residual == "per_rank" and not gather:
            if memory.residual_missing:
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

        saver = self._saver()
        if not joint or saver is None or not saver.run(memory.step, collect):
            self._warn_inexact(memory.step, joint)
            return "none", [], {}, False
        if kind == "mean":
            for name in names:
                memory.residuals[name].copy_(collected[name])
            memory.residuals_shared = True
        return kind, everyone, collected, True

    def _saver(self) -> JointSave | None:
        """None before the first backward pass, in which the ranks agree on a place in the store."""
        registration = self._low_rank._registration if self._low_rank is not None else None
        if registration is None or registration.nonce is None:
            return None
        if self._joint_save is None or self._joint_save[0] != registration.nonce:
            saver = JointSave(self._group, registration.nonce, self.joint_save_limit_s)
            self._joint_save = (registration.nonce, saver)
        return self._joint_save[1]

    def _warn_inexact(self, step: int, joint: bool) -> None:
        if not joint:
            reason = "this rank saves on its own"
        elif self._saver() is None:
            reason = "no backward pass has run since the hook was attached"
        else:
            reason = f"not every rank took part within {self.joint_save_limit_s:g} s"
        logger.warning(
            "commhooks: hook %s was saved at step %s without residuals, because %s. The saved state is marked inexact: "
            "a run that resumes from it starts from residuals of zero.",
            self.name,
            step,
            reason,
        )

    def _adopt(self, memory: Memory, start: int) -> None:
        assert self._low_rank is not None
        if self._low_rank._registration is not None:
            # Steps that an accelerator has not told of yet belong to the memory that ends here.
            self._low_rank._registration.pipeline.settle()
        own = self._low_rank._memory
        own.step, own.nonfinite_steps, own.loss_scale = memory.step, memory.nonfinite_steps, memory.loss_scale
        own.q, own.residuals, own.residual_missing = memory.q, memory.residuals, memory.residual_missing
        own.residuals_shared = memory.residuals_shared
        self._low_rank._options = dataclasses.replace(self._low_rank._options, start_powerSGD_iter=start)
        if isinstance(self._config, PowerSGD):
            self._config = dataclasses.replace(self._config, start_powerSGD_iter=start)
            self.options["start_powerSGD_iter"] = start
        registration = self._low_rank._registration
        if registration is not None:
            registration.options = self._low_rank._options
            registration.start_step = start
            registration.checked = False

    def _target(self) -> payload.Target:
        assert self._low_rank is not None
        plans = {p.name: p for p in self._plan_parameters() if p.compressed} if not self._batched() else {}
        seed = self._low_rank.random_seed

        def refit(name: str) -> torch.Tensor:
            plan = plans[name]
            return codec.draw(seed, name, "Q", plan.rank, plan.m, torch.float64)

        options = dataclasses.asdict(self._low_rank._options)
        ranks = {name: plan.rank for name, plan in plans.items()}
        return payload.Target(self.name, options, self._names.known(), ranks, self._rank, self._world_size, refit=refit)

    def _user_payload(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "format": "commhooks",
            "version": payload.VERSION,
            "hook": self.name,
            "options": dict(self.options),
            "step": self._simple_step(),
            "world_size": self._world_size,
            "hook_state": None,
        }
        if self._saves_user_state():
            saved["hook_state"] = self._state.state_dict()
        return saved

    def _simple_step(self) -> int:
        """Of a hook that is not PowerSGD: all its synchronised backward passes, those before a resume included."""
        return self._passes_before + self._stats.backward_passes

    def _load_user_state(self, saved: dict[str, Any]) -> None:
        step = saved.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise PayloadError(f"damaged hook state: 'step' is {step!r}")
        if saved.get("hook_state") is not None:
            if not self._saves_user_state():
                raise PayloadError(
                    f"the checkpoint holds a state of hook {self.name!r}, but its hook_state now "
                    f"({type(self._state).__name__}) has no load_state_dict"
                )
            self._state.load_state_dict(saved["hook_state"])
        self._passes_before = step - self._stats.backward_passes

    def _saves_user_state(self) -> bool:
        return callable(getattr(self._state, "state_dict", None)) and callable(
            getattr(self._state, "load_state_dict", None)
        )

    # ---- plan --------------------------------------------------------------------------------------------------------

    def warn_if_useless(self) -> None:
        """Say once what the user would otherwise find out from the network's counters."""
        if self._rank != 0:
            return
        if self._low_rank is not None and not self._batched() and not self.plan().compressed:
            logger.warning(
                "PowerSGD at rank %s compresses no parameter of this model: print(hook.plan()) says why for each.",
                self._low_rank.matrix_approximation_rank,
            )
        if self._low_rank is None and self._config is None and self._state is not None:
            if not isinstance(self._state, dist.ProcessGroup) and not self._saves_user_state():
                logger.warning(
                    "the state of hook %s (%s) has no state_dict and load_state_dict: checkpoints do not hold it.",
                    self.name,
                    type(self._state).__name__,
                )

    def _batched(self) -> bool:
        low_rank = getattr(self._function, "_commhooks_low_rank", None)
        return low_rank is not None and bool(low_rank[0])

    def _own_wire(self) -> torch.dtype | None:
        return {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}.get(self.name)

    def _plan_parameters(self) -> list[ParameterPlan]:
        plans = []
        for name, parameter in self._names.known().items():
            if self._low_rank is None:
                numel = parameter.numel() * (2 if parameter.is_complex() else 1)
                plans.append(
                    ParameterPlan(name, tuple(parameter.shape), numel, parameter.dtype, False, f"hook {self.name}")
                )
                continue
            plans.append(
                plan_parameter(
                    name,
                    parameter,
                    matrix_approximation_rank=self._low_rank.matrix_approximation_rank,
                    min_compression_rate=self._low_rank.min_compression_rate,
                    sparse=id(parameter) in self._sparse,
                )
            )
        return plans
