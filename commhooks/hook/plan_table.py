"""A `ModelPlan` as text."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commhooks.hook.model_plan import ModelPlan


def plan_table(plan: "ModelPlan") -> str:
    """Tables of the parameters and buckets, and a line about memory; ends with a line break."""
    tables = [_parameters(plan), *([_buckets(plan)] if plan.bucket_names else [])]
    return text_of(*tables) + memory_line(plan)


def text_of(*parts: Any) -> str:
    """What rich prints of `parts`, names literally: no markup, no emoji for ":x:"."""
    from rich.console import Console

    console = Console(width=120, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def memory_line(plan: "ModelPlan") -> str:
    """A line about the memory that the hook needs on each rank; empty if it needs none."""
    memory = plan.memory
    if plan.sends is None or not memory.total:
        return ""
    parts = {"residuals": memory.residual, memory.factors_are: memory.factors, "packed to send": memory.packed}
    parts |= {"copies of gradients": memory.copies}
    shown = ", ".join(f"{plan.unit.number(size)} {name}" for name, size in parts.items() if size)
    whose = "of this rank" if plan.arrangement else "per rank"
    return f"Memory {whose}: {plan.unit.text(memory.total)} ({shown})\n"


def _parameters(plan: "ModelPlan") -> Any:
    title = f"{plan.hook}: compressed from step {plan.start_step} on" if plan.selective else plan.hook
    title += f", {plan.arrangement}" if plan.arrangement else ""
    table = new_table(title)
    # Long names and reasons are wrapped, never truncated; numbers are not wrapped.
    table.add_column("parameter", overflow="fold")
    table.add_column("shape", overflow="fold")
    columns = max((type(p).columns for p in plan.parameters), key=len, default=())
    for name in columns:
        table.add_column(name, justify="left" if " x " in name else "right", no_wrap=True)
    table.add_column(plan.unit.name, justify="right", no_wrap=True)
    table.add_column(f"{plan.unit.name} sent", justify="right", no_wrap=True)
    if plan.selective:
        table.add_column("not compressed because", overflow="fold")
    for p in plan.parameters:
        cells = p.cells if p.compressed else ("",) * len(columns)
        table.add_row(
            p.name,
            "x".join(map(str, p.shape)) or "scalar",
            *cells,
            plan.unit.number(p.size_bytes()),
            "?" if plan.sends is None else plan.unit.number(plan.sent_bytes(p)),
            *([p.reason] if plan.selective else []),
        )
    return table


def _buckets(plan: "ModelPlan") -> Any:
    table = new_table("Buckets, as in the latest backward pass")
    table.add_column("bucket", justify="right", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    table.add_column(plan.unit.name, justify="right", no_wrap=True)
    table.add_column(f"{plan.unit.name} sent", justify="right", no_wrap=True)
    for place, bucket in enumerate(plan.buckets):
        names = bucket.parameters
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        sent = "?" if plan.sends is None else plan.unit.number(bucket.bytes_after)
        table.add_row(str(place), shown, plan.unit.number(bucket.bytes_before), sent)
    return table


def new_table(title: str | None = None) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE)
