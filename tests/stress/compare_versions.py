"""Does another version of commhooks behave as this one did, to the last bit? For refactorings.

    cd /tmp
    PYTHONPATH=/path/to/old python compare_versions.py record --output old.pt
    PYTHONPATH=/path/to/new python compare_versions.py record --output new.pt
    python compare_versions.py compare old.pt new.pt

`record` trains small models with every hook in every situation of DDP, on 1, 2 and 3 ranks, with the commhooks that is
importable, and notes weights, gradients, saved states, plans, statistics, log lines, errors and the output of the
commands. `compare` prints each difference and exits with 1 if there is one. Pickles of PowerSGD states that the old
version has made are gone on with by both:

    PYTHONPATH=/path/to/old python compare_versions.py resume-pickles old.pt --output old_pickles.pt
    PYTHONPATH=/path/to/new python compare_versions.py resume-pickles old.pt --output new_pickles.pt
    python compare_versions.py compare old_pickles.pt new_pickles.pt

Only the public names of commhooks are used (compare_training.py and what uses it). Both versions must run on the same
machine with the same torch: other processors and kernels give other bits.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fnmatch
import gc
import multiprocessing
import multiprocessing.connection
import os
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

# Before torch is imported, here and in the ranks.
for _name in list(os.environ):
    if _name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_", "PL_", "ACCELERATE_")) or "WORLD_SIZE" in _name:
        del os.environ[_name]
for _name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"):
    os.environ.pop(_name, None)
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", "NO_COLOR": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

CASE_LIMIT_S, START_LIMIT_S, GROUP_LIMIT_S = 90.0, 120.0, 30.0


def load_cases() -> dict[str, Any]:
    """By full name, in the order in which they run."""
    from compare_cases import grid_cases
    from compare_errors import error_cases
    from compare_payloads import payload_cases

    cases = error_cases() + payload_cases() + grid_cases()
    assert len({case.full_name for case in cases}) == len(cases)
    return {case.full_name: case for case in sorted(cases, key=lambda case: case.world_size)}


# ------------------------------------------------------------------------------------------------------------ the ranks


class Ranks:
    """Processes that are kept for all cases of one world size; each case has a process group of its own."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._tasks = 0
        self._folder = tempfile.TemporaryDirectory(prefix="compare-")

    def run(self, name: str, data: Any = None) -> list[Any]:
        """What each rank returned; a rank that failed, or did not answer in time, has a text in place of it."""
        if not self._processes:
            self._start()
        self._tasks += 1
        store = str(Path(self._folder.name) / f"store-{self._tasks}")
        for connection in self._connections:
            connection.send((name, store, data))
        answers = self._collect(CASE_LIMIT_S)
        Path(store).unlink(missing_ok=True)
        if None in answers:
            self.close()
        return ["no answer" if answer is None else answer[0] for answer in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            said = str(Path(self._folder.name) / f"stderr-{rank}")
            arguments = (theirs, rank, self.world_size, said)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        if None in self._collect(START_LIMIT_S):
            self.close()
            raise SystemExit("the ranks did not start")

    def _collect(self, limit_s: float) -> list[Any]:
        """One message of each rank, None of those that are late or dead."""
        deadline = time.monotonic() + limit_s
        answers: list[Any] = [None] * self.world_size
        for rank, connection in enumerate(self._connections):
            with contextlib.suppress(EOFError, OSError):
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    answers[rank] = connection.recv()
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for rank, process in enumerate(self._processes):
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            elif process.exitcode:
                print(Path(self._folder.name, f"stderr-{rank}").read_text()[-3000:], file=sys.stderr)
        self._processes, self._connections = [], []


def rank_main(connection: multiprocessing.connection.Connection, rank: int, world_size: int, said: str) -> None:
    """One rank: runs cases by name until the parent closes the pipe."""
    said_fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said_fd, 2)  # what torch itself says
    faulthandler.enable()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    from compare_cases import resume_pickle
    from compare_observed import Case, observed, tidy

    cases = load_cases()
    connection.send("ready")
    while True:
        try:
            name, store, data = connection.recv()
        except (EOFError, OSError):
            return
        # All ranks have answered: only now does any of them close its connections.
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect(1)
        faulthandler.dump_traceback_later(CASE_LIMIT_S + 10, exit=True)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=GROUP_LIMIT_S),
            )
            case = cases.get(name) or Case(world_size, name, resume_pickle)
            answer = observed(case, data)
        except Exception as error:
            traceback.print_exc()
            answer = tidy(f"{type(error).__name__}: {error}")
            # The others wait for this rank: let go of the group, so that they get an error and not a time-out.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            time.sleep(0.05)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        connection.send((answer,))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# --------------------------------------------------------------------------------------------------------- the commands


def record(output: Path, only: str) -> None:
    """Run the grid and write what was found."""
    cases = {name: case for name, case in load_cases().items() if fnmatch.fnmatch(name, only)}
    found: dict[str, list[Any]] = {}
    pickles: dict[str, list[Any]] = {}
    began = time.monotonic()
    for world_size in sorted({case.world_size for case in cases.values()}):
        ranks = Ranks(world_size)
        mine = [case for case in cases.values() if case.world_size == world_size]
        print(f"{world_size} ranks: {len(mine)} cases, {time.monotonic() - began:.0f} s so far", flush=True)
        for case in mine:
            answers = ranks.run(case.full_name)
            _complain(case.full_name, answers)
            if case.pickles:
                pickles[case.name] = answers
            elif case.many and all(isinstance(answer, dict) for answer in answers):
                for key in dict.fromkeys(key for answer in answers for key in answer):
                    found[f"{case.full_name}: {key}"] = [answer.get(key) for answer in answers]
            else:
                found[case.full_name] = answers
        ranks.close()
    _write(output, found, began, pickles)


def resume_pickles(source: Path, output: Path) -> None:
    """Go on with the pickles of another record."""
    from compare_cases import PICKLE_USES

    pickles = torch.load(source, weights_only=False)["pickles"]
    began, ranks = time.monotonic(), Ranks(2)
    found = {}
    for name, of_ranks in pickles.items():
        for use in PICKLE_USES:
            full_name = f"pickle of {name}: {use}"
            found[full_name] = ranks.run(full_name, (of_ranks, use))
            _complain(full_name, found[full_name])
    ranks.close()
    _write(output, found, began, {})


def _complain(name: str, answers: list[Any]) -> None:
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            print(f"{name}, rank {rank}: {answer[:300]}", flush=True)


def _write(output: Path, found: dict[str, Any], began: float, pickles: dict[str, Any]) -> None:
    import commhooks

    found = _shared(found, {})
    about = {"commhooks": str(commhooks.__file__), "torch": torch.__version__, "seconds": time.monotonic() - began}
    torch.save({"about": about, "cases": found, "pickles": pickles}, output)
    failed = sum(any(isinstance(answer, str) for answer in answers) for answers in found.values())
    size = output.stat().st_size / 1e6
    print(f"{len(found)} cases ({failed} of them failed) in {about['seconds']:.0f} s, {output}: {size:.0f} MB")


def _shared(value: Any, known: dict[Any, Any]) -> Any:
    """The same, with equal bytes and texts there once: pickled, they are written once."""
    if isinstance(value, (bytes, str)):
        return known.setdefault(value, value)
    if isinstance(value, dict):
        return {_shared(key, known): _shared(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shared(item, known) for item in value)
    return value


def compare(one: Path, other: Path, only: str, ignore: list[str]) -> int:
    """Print the differences; the exit status."""
    a, b = (torch.load(path, weights_only=False) for path in (one, other))
    print(f"A: {a['about']}\nB: {b['about']}")
    equal = differ = 0
    for name in fnmatch.filter(dict.fromkeys([*a["cases"], *b["cases"]]), only):
        if name not in a["cases"] or name not in b["cases"]:
            found = [f"only in {'A' if name in a['cases'] else 'B'}"]
        else:
            pairs = zip(a["cases"][name], b["cases"][name], strict=True)
            found = [
                f"rank {rank}: {key}: {text}"
                for rank, (x, y) in enumerate(pairs)
                for key, text in differences(x, y)
                if not any(fnmatch.fnmatch(key, pattern) for pattern in ignore)
            ]
        for line in found:
            print(f"{name}: {line}")
        equal, differ = equal + (not found), differ + bool(found)
    print(f"{equal} cases equal, {differ} differ")
    return 1 if differ else 0


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(where, what) of everything that is not the same; types, the order of keys and the bits of numbers count."""
    if type(a) is not type(b):
        yield key, f"{_short(a)} -> {_short(b)}"
    elif isinstance(a, dict) and "tensor" in a and "bytes" in a:
        if a != b:
            yield key, _tensors(a, b)
    elif isinstance(a, dict):
        for missing in [each for each in a if each not in b]:
            yield f"{key}/{missing}", f"{_short(a[missing])} -> nothing"
        for more in [each for each in b if each not in a]:
            yield f"{key}/{more}", f"nothing -> {_short(b[more])}"
        common = [each for each in a if each in b]
        if common != [each for each in b if each in a]:
            yield key, f"another order of keys: {_short(list(a))} -> {_short(list(b))}"
        for each in common:
            yield from differences(a[each], b[each], f"{key}/{each}")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield key, f"{len(a)} entries -> {len(b)}: {_short(a)} -> {_short(b)}"
        for place, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{key}/{place}")
    elif isinstance(a, float):
        if struct.pack("d", a) != struct.pack("d", b):
            yield key, f"{a!r} -> {b!r}"
    elif a != b:
        yield key, f"{_short(a, b)} -> {_short(b, a)}"


def _tensors(a: dict[str, Any], b: dict[str, Any]) -> str:
    if (a["tensor"], a["shape"]) != (b["tensor"], b["shape"]) or not a["bytes"]:
        return f"{a['tensor']} {a['shape']} -> {b['tensor']} {b['shape']}"
    x, y = (torch.frombuffer(bytearray(t["bytes"]), dtype=getattr(torch, t["tensor"][6:])) for t in (a, b))
    distance = (x - y).abs().double() if x.is_complex() else (x.double() - y.double()).abs()
    return f"{int((x != y).sum())} of {x.numel()} numbers differ, by up to {distance.max().item():.3g}"


def _short(value: Any, other: Any = "") -> str:
    """A part of it; of a text the part from where it differs from another one."""
    if isinstance(value, str) and isinstance(other, str) and len(value) > 150:
        first = next((n for n, (x, y) in enumerate(zip(value, other, strict=False)) if x != y), len(other))
        value = value[max(0, first - 40) :]
    text = repr(value)
    return text if len(text) <= 150 else f"{text[:150]}..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the grid with the commhooks that is importable")
    recording.add_argument("--output", type=Path, required=True)
    recording.add_argument("--only", default="*", metavar="GLOB", help="cases by full name, e.g. '2 ranks: fused*'")
    resuming = commands.add_parser("resume-pickles", help="go on with the pickles in a record")
    resuming.add_argument("record", type=Path)
    resuming.add_argument("--output", type=Path, required=True)
    comparing = commands.add_parser("compare", help="print the differences of two records")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--only", default="*", metavar="GLOB", help="cases by full name")
    comparing.add_argument("--ignore", nargs="*", default=[], metavar="GLOB", help="keys, e.g. '*/debug log*'")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.a, given.b, given.only, given.ignore)
    import commhooks

    print(f"commhooks of {commhooks.__file__}, torch {torch.__version__}", flush=True)
    if given.command == "record":
        record(given.output, given.only)
    else:
        resume_pickles(given.record, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
