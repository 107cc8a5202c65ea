"""The doctor's results as a table and as plain types."""

import math
import random
from dataclasses import dataclass
from typing import Any

from commhooks.compressors.candidates import ALLREDUCE, MARGIN, NOOP, choose
from commhooks.plan import new_table, text_of
from commhooks.tools.doctor.measure import Measured

LEGEND = (
    "step: forward, backward and exchange, without the optimizer, from a common start to the end of the last rank. MB "
    "sent: handed to all-reduce. error: of the gradient of one step, as a share of its norm; hooks with error feedback "
    "send what is missing in later steps, so compare the loss that you reach."
)


@dataclass(frozen=True)
class DoctorReport:
    """Returned by `commhooks.doctor`, the same on every rank. `print(report)` shows a table.

    Attributes:
        measured: label -> measurements, in display order.
        world_size: number of ranks.
        backend: backend of the process group.
        not_measured: labels of hooks that compress no parameter of this model.
    """

    measured: dict[str, Measured]
    world_size: int
    backend: str
    not_measured: tuple[str, ...] = ()

    @property
    def chosen(self) -> str:
        """The label of the hook to use, by the rule of `auto`: the most exact one among those that are within 10 % of
        the fastest; "allreduce" if none makes the step 10 % shorter."""
        tried = {label: each for label, each in self.measured.items() if label != NOOP.label}
        known = {label: each.candidate for label, each in tried.items()}
        return choose({label: each.median_ms for label, each in tried.items()}, known, ALLREDUCE.label)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients per step and rank."""
        return self.measured[ALLREDUCE.label].bytes_uncompressed

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types, for JSON. Times are lists with one number per measured step, in milliseconds."""
        candidates = {}
        for label, each in self.measured.items():
            candidates[label] = {
                "hook": each.candidate.hook,
                "hook_options": each.options,
                "median_ms": each.median_ms,
                "quartiles_ms": list(each.quartiles_ms),
                "step_ms": each.step_ms,
                "bytes_sent": each.bytes_sent,
                "error": each.error if each.error is not None and math.isfinite(each.error) else None,
            }
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "gradient_bytes": self.gradient_bytes,
            "candidates": candidates,
            "not_measured": list(self.not_measured),
            "chosen": self.chosen,
        }

    def __str__(self) -> str:
        state = random.getstate()  # importing rich draws a number (rich 15)
        try:
            return text_of(self._table(), *self._sentences()).strip("\n")
        finally:
            random.setstate(state)

    def _table(self) -> Any:
        table = new_table(f"{self.world_size} ranks, {self.backend}, {self.gradient_bytes / 1e6:.3f} MB of gradients")
        table.add_column("hook", no_wrap=True)
        for column in ("step, ms: median (quartiles)", "x faster", "MB sent", "error"):
            table.add_column(column, justify="right", no_wrap=True)
        plain_ms = self.measured[ALLREDUCE.label].median_ms
        for label, each in self.measured.items():
            low, high = each.quartiles_ms
            table.add_row(
                f"{label} <-" if label == self.chosen else label,
                f"{each.median_ms:.1f} ({low:.1f} .. {high:.1f})",
                f"{plain_ms / each.median_ms:.2f}",
                f"{each.bytes_sent / 1e6:.3f}",
                "-" if each.error is None else f"{each.error:.2g}",
            )
        return table

    def _sentences(self) -> list[str]:
        chosen, percent = self.measured[self.chosen], f"{100 * (MARGIN - 1):.0f} %"
        if chosen.candidate == ALLREDUCE:
            use = f"No hook makes the step {percent} shorter: train without one."
        else:
            options = f", hook_options={dict(chosen.candidate.options)!r}" if chosen.candidate.options else ""
            use = (
                f"The fastest, or the most exact one within {percent} of it:\n"
                f"    commhooks.attach(ddp_model, {chosen.candidate.hook!r}{options})"
            )
        unused = [f"{label} compresses no parameter of this model: not measured." for label in self.not_measured]
        return [use, LEGEND, *unused]
