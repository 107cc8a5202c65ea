"""`LocalStepsHook`: local steps (DiLoCo, local SGD) as a `Hook`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from commhooks.checkpoint.learned_state import LearnedStateCheckpointer
from commhooks.checkpoint.payload import inexact
from commhooks.comm.groups import new_group
from commhooks.comm.nodes import find_nodes
from commhooks.compressors.state_field import StateField
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import GradientSource, PassListener, held_weakly
from commhooks.hook.kinds import Prepared
from commhooks.hook.protocol import Residuals
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.driver import LocalStepsDriver
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.partner import FixedPartner, Partner
from commhooks.local_steps.saving import RoundSaves
from commhooks.plan import ModelPlan, SavedBy, parameter_plans, session_plan
from commhooks.report import Status, Summary, Use
from commhooks.request import HookRequest

if TYPE_CHECKING:
    from commhooks.members.members import Members


def prepare(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    compressor = request.new_compressor(total_steps)
    assert isinstance(compressor, LocalStepsCompressor)
    return Prepared(compressor, functools.partial(_build, request, source, binding, compressor))


def _build(
    request: HookRequest,
    source: GradientSource,
    binding: Binding,
    compressor: LocalStepsCompressor[Any],
    choice: KernelChoice,
) -> "LocalStepsHook":
    if compressor.config.delay and request.members is None:
        # its collectives overlap with the model's own
        group = new_group([range(source.group.size())], source.group, source.device)
        binding = dataclasses.replace(binding, group=held_weakly(group))
    partner, members_of = _partner(request, source, binding, compressor)
    names = source.names.named_parameters()
    sizes = {
        name: parameter.numel() for name, parameter in zip(names, source.stepped(), strict=True)
    }
    outer = OuterSteps(compressor, binding, sizes, partner)
    outer.consensus.compute_with(choice)
    driver = LocalStepsDriver(request.name, source, outer)
    return LocalStepsHook(request, source, driver, members_of(driver))


def _partner(
    request: HookRequest,
    source: GradientSource,
    binding: Binding,
    compressor: LocalStepsCompressor[Any],
) -> tuple[Partner, "Callable[[LocalStepsDriver], Members | None]"]:
    """Return with whom the model exchanges its weights, and what makes `CommHook.members`."""
    if request.members is None:
        nodes = find_nodes(request.ranks_per_node, binding.group(), source.device)
        return FixedPartner(binding.group, nodes), lambda driver: None
    # Imported here, so that a hook without `members` runs without that package, and without
    # torchft.
    from commhooks.members.join import join
    from commhooks.members.members import Members

    machines = join(request.members, request.name, compressor, source)
    return machines, lambda driver: Members(driver, machines)


class LocalStepsHook:
    """Implements `Hook` for local steps, which `LocalStepsDriver` runs."""

    def __init__(
        self,
        request: HookRequest,
        source: GradientSource,
        driver: LocalStepsDriver,
        members: "Members | None" = None,
    ) -> None:
        self.driver = driver
        self.counters = driver.counters
        self.run = driver.run
        self.end_pass = driver.end_pass
        self.members = members
        self._request = request
        self._source = source
        self._outer = driver.outer
        self._saves = RoundSaves(request.name, source, driver)
        self._saved_by = SavedBy.of(request, source)
        self.checkpointer = _LocalStepsCheckpointer(request.name, source, driver, self._saves)

    def listeners(self, *, logs: bool) -> list[PassListener]:
        return []

    def status(self) -> Status:
        compressor = self._outer.compressor
        use = Use(
            acted=self.counters.compressed_steps + self.counters.nonfinite_steps > 0,
            plain=self.driver.averages,
            begins=compressor.start_step,
            acts=compressor.start_step + compressor.config.sync_every,
            missing="averaged no weights",
            remedy=f"Set {compressor.config.start_option} to a smaller number, or sync_every",
        )
        return Status(
            dataclasses.asdict(compressor.config),
            use,
            counts_bytes=True,
            counts_outcomes=True,
            replicas_agree=not self.driver.state.apart,
            run_number=self._outer.consensus.nonce,
        )

    def stats(self) -> dict[str, Any]:
        self._outer.held.settle()
        norm, cosine = self._outer.norm_and_cosine()
        assert self._outer.consensus.choice is not None
        return {
            "step": self.checkpointer.step,
            "kernel": self._outer.consensus.choice.name,
            "step_in_round": self.driver.state.in_round,
            "outer_gradient_norm": norm,
            "outer_gradient_cosine": cosine,
            **self.driver.partner.stats(),
        }

    def summary(self) -> Summary:
        buffers = any(True for _ in self.driver.module.buffers())
        more = (
            "; DDP no longer broadcasts buffers, which are rank 0's from each outer step on"
            if buffers
            else ""
        )
        compressor = self._outer.compressor
        choice = self._outer.consensus.choice
        assert choice is not None
        kernel = "native kernel" if choice.native else ""
        details = filter(None, (compressor.summary, kernel, self.driver.partner.description))
        return Summary(
            list(details),
            f"{self.plan().summary()}{more}",
            ". Outer steps are still done, so the run can resume on more ranks; hook=None trains"
            " without",
            choice.warnings(compressor.display_name, checked=self._request.check_every is not None),
        )

    def warnings(self) -> list[str]:
        warnings = list(self.driver.still_sent)
        if self._request.check_every is not None and not self._outer.rules.at_once:
            warnings.append(
                "check_every compares weights when they should be equal on all ranks: with"
                " fragments or delay that is after a save or a validation only"
            )
        return [f"hook {self._request.name}: {warning}" for warning in warnings]

    def plan(self) -> ModelPlan:
        plan = session_plan(self._request.name, self._outer, self._source.sparse, self._saved_by)
        nodes = self.driver.partner.nodes
        return plan if nodes is None else dataclasses.replace(plan, arrangement=nodes.description)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        # The residuals of weights cannot be compared with gradients.
        yield Residuals({}, 1.0, {plan.name for plan in self.plan().parameters if plan.compressed})

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return self._saves.synchronize(
            self.checkpointer.joint_save(), limit_s, optimizers=optimizers
        )

    def close(self) -> None:
        self.driver.close()


class _LocalStepsCheckpointer(LearnedStateCheckpointer):
    """Ends the round before each save, so that all ranks have equal weights and optimizers."""

    step_is = "round"

    def __init__(
        self, hook: str, source: GradientSource, driver: LocalStepsDriver, saves: RoundSaves
    ) -> None:
        # A bound method would keep this object, and with it the learned state, in a reference
        # cycle.
        plans = functools.partial(parameter_plans, names=source.names, sparse=source.sparse)
        super().__init__(hook, driver.outer, source.group, plans)
        self._driver = driver
        self._saves = saves

    def save(
        self, residual: str, *, limit_s: float, gather: bool = False, joint: bool = True
    ) -> dict[str, Any]:
        together = joint and self._saves.synchronize(self.joint_save(), limit_s, optimizers=True)
        content = super().save(residual, limit_s=limit_s, gather=gather, joint=together)
        reason = self._saves.why_inexact(together=together)
        return inexact(content, reason) if reason else content

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        return functools.partial(
            self._driver.begin_from_load, super().prepare_load(content, strict)
        )

    def begin_anew(self) -> None:
        self._driver.begin_from_load(super().begin_anew)

    def _device_of(self, field: StateField, parameter: torch.Tensor) -> torch.device:
        offloads = field.replicated and self._driver.outer.compressor.offloads(parameter.device)
        return torch.device("cpu") if offloads else parameter.device

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        dtypes = {
            name: compute_dtype(parameter.dtype)
            for name, parameter in source.whole.named_parameters().items()
        }
        return {field.key: dict(dtypes) for field in self._session.compressor.state_fields}
