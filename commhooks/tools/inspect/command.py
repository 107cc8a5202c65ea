"""`commhooks inspect`: show the hook state in a checkpoint."""

import argparse
import json
import sys
from typing import Any

from commhooks.checkpoint.checks import REPLICAS_EQUAL, shown
from commhooks.compressors.units import Unit
from commhooks.hook.plan_table import new_table, text_of
from commhooks.tools.inspect.payload import inspect_path
from commhooks.tools.named_model import plain


def run(arguments: argparse.Namespace) -> int:
    """Print the reports; returns 1 if a payload has a defect."""
    reports = inspect_path(arguments.path)
    if arguments.json:
        print(json.dumps({"payloads": reports}, indent=2))
    else:
        for report in reports:
            if "hook" in report:
                print(report_text(report))
            for problem in report["problems"]:
                print(f"commhooks inspect: {report['where']}: {problem}", file=sys.stderr)
    return 1 if any(report["problems"] for report in reports) else 0


def report_text(report: dict[str, Any]) -> str:
    """The report of one payload as text: header and table."""
    options = ", ".join(f"{plain(str(name))}={shown(value)}" for name, value in report["options"].items())
    notes = [f"{k}={shown(v)}" for k, v in report.get("notes", {}).items() if not isinstance(v, (dict, list))]
    rows = {"hook": plain(report["hook"]), "options": options or "none"}
    rows |= {"notes": plain(", ".join(notes))} if notes else {}
    rows |= {"step": report["step"], "world size": report["world_size"]}
    if not report.get(REPLICAS_EQUAL, True):
        rows["replicas"] = "had drifted apart: the hook averages nothing, and the weights are those of one rank"
    if "parameters" in report:
        rows |= {
            "non-finite": f"{report['nonfinite_steps']} steps",
            "loss scale": f"{report['loss_scale']:g}",
            "residuals": _residual_text(report),
            "size": Unit.of(report["size_bytes"]).text(report["size_bytes"]),
        }
    rows |= {} if report["hook_state"] is None else {"hook_state": report["hook_state"]}
    lines = [f"  {name:10}  {row}" for name, row in rows.items()]
    return "\n".join([plain(report["where"]), *lines]) + "\n" + _table(report)


def _residual_text(report: dict[str, Any]) -> str:
    if not report["exact"]:
        return "missing, because not all ranks took part in saving: a run that resumes starts from residuals of zero"
    if report["residual"] == "mean":
        return f"the mean over {report['world_size']} ranks"
    if report["residual"] == "none":
        return "not saved"
    ranks = report["residual_ranks"]
    if not ranks:
        return "in files of the ranks, none of which is here, or none yet"
    if len(ranks) == report["world_size"]:
        return f"of each of {len(ranks)} ranks"
    return f"of rank {', '.join(map(str, ranks))} only"


def _table(report: dict[str, Any]) -> str:
    unit = Unit.of(report.get("size_bytes", 0))
    table = new_table()
    for column in ("parameter", "shape", "Q", "P"):
        table.add_column(column, overflow="fold")
    table.add_column("residual norm", overflow="fold", justify="right")
    table.add_column(unit.name, justify="right", no_wrap=True)
    for each in report.get("parameters", ()):
        shapes = (_shape(each["shape"]) or "scalar", _shape(each["q"]), _shape(each["p"]))
        table.add_row(plain(each["name"]), *shapes, _norms(each), unit.number(each["size_bytes"]))
    for each in report.get("batched_q", ()):
        table.add_row(plain(each["name"]), "", _shape(each["shape"]), "", "", unit.number(each["size_bytes"]))
    return text_of(table) if table.row_count else ""


def _norms(entry: dict[str, Any]) -> str:
    """The residual norm, or the smallest and the largest norm of all ranks."""
    if entry["residual_norm_per_rank"] is None:
        return "" if entry["residual_norm"] is None else f"{entry['residual_norm']:.3g}"
    norms = list(entry["residual_norm_per_rank"].values())
    return f"{norms[0]:.3g}" if len(norms) == 1 else f"{min(norms):.3g} .. {max(norms):.3g}"


def _shape(sizes: list[int] | None) -> str:
    return "" if sizes is None else "x".join(map(str, sizes))
