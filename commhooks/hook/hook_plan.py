"""The plan of a hook that is attached: of the model's parameters, and of the buckets that DDP has shown so far."""

from collections.abc import Collection

from commhooks.compressors.config import HookConfig
from commhooks.compressors.powersgd.plan_rows import plan_rows
from commhooks.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from commhooks.gradients.names import GivenNames
from commhooks.hook.plan import LATEST_PASS, ModelPlan, ParameterPlan
from commhooks.hook.request import HookSpec


class HookPlan:
    """Made anew when it is asked for: loading a state may change the options.

    Args:
        config: None for a hook of the user's own.
        low_rank: the state of PowerSGD, None for other hooks.
        batched: whether whole buckets are compressed.
        sparse: ids of the parameters whose gradients are sparse.
    """

    def __init__(
        self,
        spec: HookSpec,
        config: HookConfig | None,
        low_rank: PowerSGDState | None,
        batched: bool,
        names: GivenNames,
        sparse: Collection[int],
    ) -> None:
        self._spec = spec
        self._config = config
        self._low_rank = low_rank
        self._batched = batched
        self._names = names
        self._sparse = sparse

    def own_q(self) -> list[ParameterPlan]:
        """Of the parameters that have a Q of their own, if compressed: none for batched PowerSGD."""
        return [] if self._batched else self._rows()

    def model(self) -> ModelPlan:
        """Of everything; see `CommHook.plan`."""
        name, wire = self._spec.name, self._spec.wire_dtype
        if self._low_rank is None:
            sends = None if self._config is None else self._config.sends
            return ModelPlan(name, tuple(self._rows()), wire, low_rank=False, sends=sends)
        registration, start = self._low_rank._registration, self._low_rank.start_powerSGD_iter
        error_feedback = self._low_rank.use_error_feedback
        if self._batched:  # each row is a bucket
            plans = registration.plan().parameters if registration is not None else ()
            return ModelPlan(name, plans, wire, start, error_feedback=error_feedback)
        return ModelPlan(
            name,
            tuple(self._rows()),
            wire,
            start,
            error_feedback=error_feedback,
            bucket_names=registration.buckets() if registration is not None else (),
            buckets_from=LATEST_PASS if registration is not None else "",
        )

    def _rows(self) -> list[ParameterPlan]:
        options = self._low_rank._options if self._low_rank is not None else None
        return plan_rows(self._spec.name, self._names, options, self._sparse)
