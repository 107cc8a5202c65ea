"""The doctor's results as a table, as JSON and as a plot."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

from commhooks.comm.link import Link, bandwidth
from commhooks.compressors.candidates import ALLREDUCE, NOOP
from commhooks.errors import DoctorError
from commhooks.hook.plan_table import new_table, text_of
from commhooks.tools.doctor.measure import Measured
from commhooks.tools.doctor.recommend import Advice, estimate_ms

LEGEND = (
    "step: forward, backward and exchange, without the optimizer, from a common start to the end of the last rank. "
    "codec: inside the hook. waiting: for all-reduces, of the rank that waits least. MB sent: handed to all-reduce."
)


@dataclass(frozen=True)
class DoctorReport:
    """Returned by `commhooks.doctor`, the same on every rank. `print(report)` shows a table.

    Attributes:
        measured: label -> measurements, in display order.
        link: the network between the ranks.
        advice: the recommendation.
        world_size: number of ranks.
        backend: backend of the process group.
        not_measured: labels of PowerSGD at ranks that compress no parameter of this model.
    """

    measured: dict[str, Measured]
    link: Link
    advice: Advice
    world_size: int
    backend: str
    not_measured: tuple[str, ...] = ()

    @property
    def gradient_mb(self) -> float:
        """MB of gradients per step and rank."""
        return self.measured[ALLREDUCE.label].bytes_uncompressed / 1e6

    def estimate_ms(self, label: str, mbit_per_s: float) -> float:
        """Estimated step time of a candidate in ms on a link of another bandwidth."""
        return estimate_ms(self.measured[label], self.measured[NOOP.label], self.link, mbit_per_s, self.world_size)

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
                "codec_ms": each.codec_ms or None,
                "waiting_ms": each.waiting_ms or None,
                "bytes_sent": each.bytes_sent,
                "collectives": each.collectives,
                "compressed_steps": each.compressed_steps,
                "kernel": each.kernel,
            }
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "gradient_bytes": self.measured[ALLREDUCE.label].bytes_uncompressed,
            "link": asdict(self.link),
            "candidates": candidates,
            "not_measured": list(self.not_measured),
            "advice": {**asdict(self.advice), "notes": list(self.advice.notes)},
        }

    def save_json(self, path: str | Path) -> None:
        """Write `as_dict()` as JSON.

        Raises:
            DoctorError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise DoctorError(f"{path} cannot be written: {error}") from error

    def plot(self, path: str | Path) -> None:
        """Write a plot of the step time against the bandwidth of the link: curves are estimates, points are measured.
        The file name's suffix determines the format (default PNG). Needs matplotlib.

        Raises:
            DoctorError: matplotlib is missing, or the file cannot be written.
        """
        from commhooks.tools.doctor.plot import draw

        draw(self, path)

    def __str__(self) -> str:
        state = random.getstate()  # importing rich draws a number (rich 15)
        try:
            return text_of(*self._recommendation(), self._table(), *self._explanation()).strip("\n")
        finally:
            random.setstate(state)

    def _table(self) -> Any:
        table = new_table(f"{self.world_size} ranks, {self.backend}, {self.gradient_mb:.3f} MB of gradients")
        table.add_column("hook", no_wrap=True)
        for column in ("step, ms: median (quartiles)", "x faster", "MB sent", "codec, ms", "waiting, ms"):
            table.add_column(column, justify="right", no_wrap=True)
        plain_ms = self.measured[ALLREDUCE.label].median_ms
        for label, each in self.measured.items():
            low, high = each.quartiles_ms
            table.add_row(
                f"{label} <-" if label == self.advice.use else label,
                f"{each.median_ms:.1f} ({low:.1f} .. {high:.1f})",
                f"{plain_ms / each.median_ms:.2f}",
                f"{each.bytes_sent / 1e6:.3f}",
                *(f"{median_high(ms):.1f}" if ms else "-" for ms in (each.codec_ms, each.waiting_ms)),
            )
        return table

    def _recommendation(self) -> list[str]:
        advice, lines = self.advice, [self.advice.reason]
        if advice.compress:
            options = f", hook_options={dict(advice.hook_options)!r}" if advice.hook_options else ""
            lines.append(f"    commhooks.attach(ddp_model, {advice.hook!r}{options})")
        below = advice.pays_below_mbit_per_s
        if below is None:
            lines.append("Estimate: nothing that was tried is worth it on a slower link either.")
        elif below >= 0.8 * self.link.mbit_per_s if advice.compress else below < self.link.mbit_per_s:
            # Show the estimate only where it agrees with the measured advice.
            lines.append(f"Estimate: compression is worth it on links of up to about {bandwidth(below)}.")
        return lines + list(advice.notes)

    def _explanation(self) -> list[str]:
        return [
            f"The link: {bandwidth(self.link.mbit_per_s)} in all-reduces of one large buffer, "
            f"{self.link.latency_ms:.2f} ms for one number.",
            LEGEND,
            *(f"{label} compresses no parameter of this model: not measured." for label in self.not_measured),
        ]


def check_output(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise DoctorError, before the measurements, if an output file cannot be written."""
    if plot_path is not None:
        from commhooks.tools.doctor.plot import check_format

        check_format(plot_path)
    for path in filter(None, (json_path, plot_path)):
        if not path.resolve().parent.is_dir():
            raise DoctorError(f"{path}: there is no folder {path.resolve().parent}")
        if path.is_dir():
            raise DoctorError(f"{path} is a folder; give the name of a file in it")
        new = not path.exists()
        try:
            path.open("a").close()
            if new:
                path.unlink()
        except OSError as error:
            raise DoctorError(f"{path} cannot be written: {error}") from error
