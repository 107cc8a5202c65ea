"""Common code of the benchmarks: ranks with one thread on separate cores, rounds in which the
candidates take turns, medians with quartiles, tables, JSON files, and a description of the machine.

Every benchmark has the options `--json FILE` and `--quick` (small sizes for a functional test; do
not quote the results). The JSON is

    {"benchmark": name, "machine": {...}, "arguments": {...}, "rows": [{column: value, ...}, ...]}
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # some benchmarks import `tests.support`
Row = dict[str, Any]
Job = TypeVar("Job", bound=Hashable)
Setting = TypeVar("Setting")
RANKS_LIMIT_S = 3600.0

# ---- arguments -----------------------------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    made.add_argument(
        "--quick", action="store_true", help="small sizes, a few seconds: only shows that it works"
    )
    made.add_argument(
        "--markdown",
        action="store_true",
        help="print the table as Markdown; also done without rich",
    )
    return made


def plot_file(doc: str | None) -> Path:
    """Parse the only argument of a benchmark that draws: the picture."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--plot", type=Path, metavar="PNG", required=True)
    file: Path = made.parse_args().plot
    return file


def parse(made: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the command line. `quick`: other defaults for --quick."""
    if made.parse_known_args()[0].quick:
        made.set_defaults(**quick)
    return made.parse_args()


def take_real_time() -> None:
    """Let this process, and those that it starts, go before all others. With fewer cores than
    machines, a thread that wakes for a message otherwise waits for the time slice of another
    machine.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError) as error:
        raise SystemExit(f"--real-time needs Linux and root ({error})") from error


# ---- ranks ---------------------------------------------------------------------------------------


def setting_from(words: str, kind: type[Setting]) -> Setting:
    """Make a dataclass whose fields have defaults from words such as `every=5 wire=int4`. Exits if
    they do not fit.
    """
    kinds = {member.name: type(member.default) for member in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if name not in kinds:
            raise SystemExit(f"--settings: no {name!r}; there are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](int(value) if kinds[name] is bool else value)
        except ValueError:
            expected = "0 or 1" if kinds[name] is bool else f"of type {kinds[name].__name__}"
            raise SystemExit(f"--settings: {word!r}; expected a value {expected}") from None
    return kind(**values)


@contextlib.contextmanager
def steady(rank: int = 0, *, threads: int = 1, pinned: bool = True) -> Iterator[None]:
    """Context manager: use that many torch threads, `pinned` to as many cores of their own if the
    system has enough and supports pinning. Do not pin on CUDA, because the threads of autograd,
    NCCL and the driver would share those cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    cores = sorted(os.sched_getaffinity(0)) if pinned and hasattr(os, "sched_setaffinity") else []
    mine = cores[rank * threads : (rank + 1) * threads]
    if len(mine) == threads:
        os.sched_setaffinity(0, mine)
    _keep_to_warnings()
    try:
        yield
    finally:
        if len(mine) == threads:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_rank(backend: str = "gloo") -> Iterator[None]:
    """Context manager: a process group with one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> Any:
    """Run `function(*args)` in one process per rank with a gloo process group, and return its
    result on rank 0 (JSON types).

    On Linux the processes are forked, which is fast: call this before the process has used torch's
    threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.start_processes(
            _rank_main,
            args=(world_size, folder, function, args),
            nprocs=world_size,
            join=False,
            start_method="fork" if sys.platform == "linux" else "spawn",
        )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=RANKS_LIMIT_S)
        try:
            while not ranks.join(timeout=1.0):  # ends all ranks and raises if one has failed
                if datetime.datetime.now() > deadline:
                    raise SystemExit(f"the ranks are not done after {RANKS_LIMIT_S:.0f} s")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
        return json.loads(Path(folder, "result.json").read_text())


def _rank_main(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with steady(rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        result = function(*args)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook


def _keep_to_warnings() -> None:
    """Suppress info messages between the tables, such as a hook's line at its first backward
    pass.
    """
    logger = logging.getLogger("commhooks")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


# ---- measurements --------------------------------------------------------------------------------


def take_turns(
    candidates: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """Call every candidate once per round, and return the results after the warm-up. The order
    changes from round to round, so that changes of the machine's load and effects of the previous
    candidate affect all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = candidates[name]()
            if turn >= warm_up:
                samples[name].append(value)
    return samples


def summary(samples: Sequence[float], unit: str) -> Row:
    """Return `{"median_UNIT", "q1_UNIT", "q3_UNIT"}`."""
    low, median, high = (
        statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    )
    return {f"median_{unit}": median, f"q1_{unit}": low, f"q3_{unit}": high}


def run_missing(
    jobs: Iterable[Job],
    results: Path,
    job_of: Callable[[Row], Job],
    run: Callable[[list[Job]], Iterable[Row]],
) -> dict[Job, Row]:
    """Return a row for each job. `results` has a line of JSON for each finished run; jobs that are
    not among them are run and appended one by one, so that hours of runs can be interrupted.
    `job_of`: which job a row is the result of.
    """
    lines = results.read_text().splitlines() if results.exists() else []
    done = {job_of(row): row for row in map(json.loads, lines)}
    missing = [job for job in dict.fromkeys(jobs) if job not in done]
    if missing:
        print(
            f"{len(missing)} runs are not in {results}: they run now", file=sys.stderr, flush=True
        )
        for row in run(missing):
            line = json.dumps(row)
            with results.open("a") as file:
                file.write(line + "\n")
            row = json.loads(line)
            done[job_of(row)] = row
            print(f"{job_of(row)}: done", file=sys.stderr, flush=True)
    return done


# ---- the machine ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return names and versions; for CUDA only if torch can use a device."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    on_cuda = torch.cuda.is_available()
    details: dict[str, Any] = {
        "cpu": cpu,
        "caches": _caches(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "cuda": torch.version.cuda if on_cuda else None,
        "driver": driver() if on_cuda else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with contextlib.suppress(OSError, AttributeError):
        details["load_before"] = os.getloadavg()[0]
    return details


def _caches() -> str | None:
    """Return the caches of one core on Linux, such as "L1d 48K, L2 1024K, L3 32768K" (other cores
    may share them).
    """
    caches = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                caches.append(f"L{level}{'d' if kind == 'Data' else ''} {size}")
    return ", ".join(caches) or None


def driver() -> str:
    """Return the version of NVIDIA's driver, for which torch has no public function."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            if done.stdout.strip():
                return done.stdout.splitlines()[0].strip()
    with contextlib.suppress(OSError):
        version = re.search(
            r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text()
        )
        if version:
            return version.group()
    return "unknown"


def in_words(at: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in at.items() if value is not None)


def no_device() -> str:
    """Return why nothing can run on CUDA here, in one sentence; "" if a device works."""
    if torch.version.cuda is None:
        return (
            f"This torch ({torch.__version__}) was built without CUDA: install one with it, or name"
            " its Python."
        )
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        return f"torch {torch.__version__} finds no CUDA device{why}."
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return (
            f"torch {torch.__version__} cannot use {torch.cuda.get_device_name()}:"
            f" {str(error).splitlines()[0]}"
        )
    return ""


# ---- output --------------------------------------------------------------------------------------

Cell = Callable[[Row], str]


def spread(unit: str, digits: int = 1) -> Cell:
    """Format as `median (q1 .. q3)`."""

    def cell(row: Row) -> str:
        if row.get(f"median_{unit}") is None:
            return row.get("note", "")
        median, low, high = (
            f"{row[f'{name}_{unit}']:.{digits}f}" for name in ("median", "q1", "q3")
        )
        return f"{median} ({low} .. {high})"

    return cell


def number(name: str, pattern: str = "{}") -> Cell:
    """Format the value with this name; "" if there is none."""
    return lambda row: "" if row.get(name) is None else pattern.format(row[name])


def report(
    benchmark: str,
    title: str,
    arguments: argparse.Namespace,
    at: Row,
    rows: list[Row],
    columns: Mapping[str, Cell],
    notes: Sequence[str] = (),
) -> None:
    """Print a table of `rows`, and write the JSON file if requested. `at`: the result of
    `machine()` before the measurement.
    """
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    if arguments.markdown or importlib.util.find_spec("rich") is None:
        print(f"{title}\n\n{_markdown(list(columns), cells)}\n")
    else:
        _print_rich(title, list(columns), rows, cells)
    print("\n".join([*notes, in_words(at)]))
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        content = {"benchmark": benchmark, "machine": at, "arguments": options, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _markdown(headings: list[str], cells: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _print_rich(title: str, headings: list[str], rows: list[Row], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right")
    before = None
    for row, line in zip(rows, cells, strict=True):
        if before is not None and before != row.get("section"):
            table.add_section()
        before = row.get("section")
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False).print(table)
