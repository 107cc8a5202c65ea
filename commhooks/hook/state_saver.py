"""Save the state of a hook in the form that was asked for, and check what is loaded."""

from collections.abc import Callable
from typing import Any

from commhooks.checkpoint.distributed import from_distributed, is_distributed, to_distributed
from commhooks.checkpoint.payload import REPLICAS_EQUAL, check_header, inexact
from commhooks.errors import HookConfigError, PayloadError, log_summary, logger_of, shown
from commhooks.gradients.source import GradientSource
from commhooks.hook.protocol import Hook
from commhooks.request import SAVE_RESIDUAL, HookRequest

logger = logger_of(__name__)


class StateSaver:
    """Implements `CommHook.state_dict` and `CommHook.prepare_load`.

    Args:
        logs: whether this rank logs.
    """

    def __init__(
        self, request: HookRequest, hook: Hook, source: GradientSource, *, logs: bool
    ) -> None:
        self._request = request
        self._hook = hook
        self._source = source
        self._logs = logs
        self._warned_of_copies = False

    def save(
        self, residual: str | None, *, gather: bool, joint: bool, limit_s: float
    ) -> dict[str, Any]:
        sharded = self._source.shard_group is not None
        if residual is None:
            residual = self._request.given_save_residual
            if sharded and residual != "drop":
                residual = "distributed"
        choices = ("distributed", "drop") if sharded else (*SAVE_RESIDUAL, "distributed")
        if residual not in choices:
            raise HookConfigError(
                f"residual={residual!r}; expected one of {', '.join(map(repr, choices))}"
            )
        if residual != "distributed" and not sharded:
            return self._hook.checkpointer.save(
                residual, gather=gather, joint=joint, limit_s=limit_s
            )
        if not joint:
            raise HookConfigError(
                "joint=False with a state for torch.distributed.checkpoint: it needs all ranks, as"
                " dcp.save does"
            )
        return self._save_distributed(residual, limit_s)

    def _save_distributed(self, residual: str, limit_s: float) -> dict[str, Any]:
        fields = self._hook.checkpointer.kept_fields(self._source)
        if residual == "drop":
            fields.pop("residual", None)
        agreed_before = self._hook.status().replicas_agree
        saved = self._hook.checkpointer.save(
            "mean" if "residual" in fields else "drop", limit_s=limit_s
        )
        if not agreed_before and self._hook.status().replicas_agree:
            saved = self._after_a_round(saved)
        return to_distributed(saved, fields, self._source)

    def _after_a_round(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Mark a save that has ended a round: copies that were made before it are older."""
        if self._logs and not self._warned_of_copies:
            self._warned_of_copies = True
            logger.warning(
                "hook %s: this save has ended a round and is marked inexact, because copies of"
                " the model's or an optimizer's state that were made before it"
                " (cpu_offload=True) are older than the hook's state. Call"
                " hook.synchronize(optimizers=True) before you copy and save.",
                self._request.name,
            )
        if not saved["exact"]:
            return saved
        return inexact(
            saved,
            "the save has ended a round: copies of the model's or an optimizer's state that"
            " were made before it (cpu_offload=True) are older than the hook's state",
        )

    def prepare_load(self, saved: object, strict: bool | None) -> Callable[[], None]:
        strict = self._request.strict if strict is None else strict
        content = check_header(
            from_distributed(saved, self._source) if is_distributed(saved) else saved
        )
        if not strict and self._logs:
            log_summary(
                f"{self._request.name}: strict=False: this load leaves out what does not fit, also"
                " of a wrong checkpoint. Remove strict=False when this run has saved again"
            )
        if not content.get(REPLICAS_EQUAL, True) and self._logs:
            logger.warning(
                "the checkpoint was saved by hook %s, which averages nothing: the ranks had drifted"
                " apart, and the saved weights are one rank's.",
                shown(content["hook"]),
            )
        if content["hook"] == self._request.name:
            return self._continue_from(content, strict)
        return self._begin_anew(content["hook"], strict)

    def _continue_from(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        name = self._request.name
        checkpointer = self._hook.checkpointer
        logs = self._logs
        take_over = checkpointer.prepare_load(content, strict)

        def resume() -> None:
            take_over()
            if logs and content["step"] > 0:
                step = f"{checkpointer.step_is} {content['step']}"
                log_summary(f"{name} resumed at {step}{checkpointer.resumed(content)}")

        return resume

    def _begin_anew(self, saved_hook: object, strict: bool) -> Callable[[], None]:
        checkpointer = self._hook.checkpointer
        text = (
            f"the saved state is of hook {shown(saved_hook)}, but this hook is"
            f" {self._request.name!r}"
        )
        if strict:
            raise PayloadError(
                f"{text}. Attach the saved hook to continue with its memory, or pass strict=False,"
                " with hook=... or to the load, to begin this one with fresh state"
            )
        if self._logs:
            logger.warning(
                "%s: it begins with fresh state (strict=False)%s",
                text,
                checkpointer.not_begun_anew,
            )
        return checkpointer.begin_anew
