"""Resume the exchange of one bucket step by step, and check what it yields."""

from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.base import Compressor, Exchange, Send, State, StepInfo, Verdict
from commhooks.errors import HookRunError
from commhooks.gradients.profiling import span


@dataclass(frozen=True)
class Done:
    result: torch.Tensor


class ExchangeTask:
    """Resumes the exchange of one bucket; nothing else does.

    Checks what the exchange yields and returns, so that errors name the compressor. Raises
    HookRunError if `exchange` is not a generator. `expects_verdict`: False if the compressor is not
    transactional.
    """

    def __init__(
        self, exchange: Exchange, flat: torch.Tensor, name: str, *, expects_verdict: bool = True
    ) -> None:
        if not (
            callable(getattr(exchange, "send", None)) and callable(getattr(exchange, "close", None))
        ):
            raise HookRunError(
                f"the exchange of {name} is a {type(exchange).__name__}, not a generator: it must"
                " yield its collectives (Send)"
            )
        self.exchange = exchange
        self._flat = flat
        self._name = name
        self._named = f"the exchange of {name}"
        self._expects_verdict = expects_verdict
        self._decided = False

    def advance(self, answer: torch.Tensor | bool | None) -> Send | Verdict | Done:
        """Run the exchange to its next yield, or to its end.

        `answer`: the result of the yielded collective; after a `Verdict`, whether the pass is
        committed; None to begin.
        """
        try:
            with span("exchange", self._name):
                yielded: Any = self.exchange.send(answer)
        except StopIteration as end:
            if self._expects_verdict and not self._decided:
                raise HookRunError(
                    f"{self._named} ended before its verdict: it must yield Verdict(finite) once, "
                    "before it writes its state"
                ) from None
            return Done(self._flat if end.value is None else self._checked_result(end.value))
        # After the verdict only the engine sends, inside a node (`HierarchicalReduction`).
        if self._decided and not (isinstance(yielded, Send) and yielded.over == "intra_node"):
            raise HookRunError(
                f"{self._named} goes on after the verdict: it must yield one Verdict, and nothing"
                " after it"
            )
        if isinstance(yielded, Verdict):
            self._decided = True
            finite: Any = yielded.finite
            if not (
                isinstance(finite, torch.Tensor)
                and finite.dim() == 0
                and finite.dtype == torch.bool
            ):
                raise self._wrong_verdict(finite)
            if not self._expects_verdict:
                raise HookRunError(f"{self._named} asks for a verdict, but it is not transactional")
        elif not isinstance(yielded, Send):
            raise HookRunError(
                f"{self._named} yields a {type(yielded).__name__}; expected Send or Verdict"
            )
        return yielded

    def _wrong_verdict(self, finite: Any) -> HookRunError:
        if isinstance(finite, torch.Tensor):
            finite = f"a tensor of shape {tuple(finite.shape)} in {finite.dtype}"
        return HookRunError(
            f"{self._named} yields Verdict({finite}); expected a bool tensor without dimensions, "
            "such as reduced.isfinite().all()"
        )

    def _checked_result(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or (
            not self._flat.is_sparse and value.shape != self._flat.shape
        ):
            what = f"a {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                what = f"a tensor of shape {tuple(value.shape)}"
            raise HookRunError(
                f"{self._named} returns {what}; expected None, with the result in the bucket, or a "
                f"tensor of shape {tuple(self._flat.shape)}"
            )
        return value


def new_task(
    compressor: Compressor[Any],
    compresses: bool,
    flat: torch.Tensor,
    work: Any,
    state: State,
    step: StepInfo,
) -> ExchangeTask:
    """Create the exchange of one bucket, an exact average if nothing in it is compressed."""
    if compresses:
        exchange = compressor.exchange(flat, work, state, step)
    else:
        exchange = compressor.average(flat, step.world_size)
    return ExchangeTask(exchange, flat, compressor.name, expects_verdict=compressor.transactional)


class _NoState:
    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        raise HookRunError(
            f"state[{key!r}]: a compressor that is not transactional has no learned state"
        )


NO_STATE: State = _NoState()
