"""Does another version of commhooks behave as this one did, to the last bit? For refactorings.

    PYTHONPATH=/path/to/old python /path/to/new/tests/stress/compare_versions.py record --output
    old.pt PYTHONPATH=/path/to/new python /path/to/new/tests/stress/compare_versions.py record
    --output new.pt python /path/to/new/tests/stress/compare_versions.py compare old.pt new.pt

`record` trains with every kind of `tests/support/kinds.py` in every situation of DDP on 1 to 4
ranks, with the packages that are importable. `compare` prints each difference and exits with 0 if
there is none.

Only the public names of commhooks are used. Both versions must run on the same machine with the
same torch: other processors and kernels give other bits.
"""

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",
    "NO_COLOR": "1",
}

# commhooks is that of PYTHONPATH. `tests` and `examples` are those of this repository, for both
# versions: what has been imported stays, so the path may be as before afterwards. The ranks come
# here, too.
_HERE = Path(__file__).resolve()
_OWN = str(_HERE.parents[2])
sys.path[:] = [each for each in sys.path if Path(each).resolve() != _HERE.parent] + [_OWN]
import commhooks  # noqa: E402

sys.path.insert(0, _OWN)
import torch  # noqa: E402

import examples.random_k  # noqa: E402, F401 - a kind names it
from examples.clean_env import is_cleared  # noqa: E402
from tests.stress.compare_cases import all_cases  # noqa: E402
from tests.stress.compare_ranks import Ranks  # noqa: E402
from tests.stress.compare_records import differences  # noqa: E402

sys.path.remove(_OWN)
for _name in filter(is_cleared, list(os.environ)):
    del os.environ[_name]


def record(output: Path, only: str) -> None:
    """Run the grid and write what was found."""
    began, found = time.monotonic(), {}
    cases = [case for name, case in all_cases().items() if fnmatch.fnmatch(name, only)]
    for world_size in sorted({case.world_size for case in cases}):
        ranks, mine = Ranks(world_size), [case for case in cases if case.world_size == world_size]
        print(
            f"{world_size} ranks: {len(mine)} cases, {time.monotonic() - began:.0f} s so far",
            flush=True,
        )
        for case in mine:
            found[case.full_name] = ranks.run(case.full_name)
        ranks.close()
    about = {
        "commhooks": commhooks.__file__,
        "torch": torch.__version__,
        "seconds": time.monotonic() - began,
    }
    torch.save({"about": about, "cases": found}, output)
    failed = {
        name: answers
        for name, answers in found.items()
        if any(isinstance(each, str) for each in answers)
    }
    for name, answers in failed.items():
        print(
            name,
            *(f"  rank {rank}: {str(each)[:300]}" for rank, each in enumerate(answers)),
            sep="\n",
        )
    print(f"{len(found)} cases ({len(failed)} of them failed) in {about['seconds']:.0f} s")


def compare(one: Path, other: Path, only: str, ignore: list[str]) -> int:
    """Print the differences; the exit status."""
    a, b = (torch.load(path, weights_only=False) for path in (one, other))
    print(f"A: {a['about']}\nB: {b['about']}")
    equal = differ = 0
    for name in fnmatch.filter(dict.fromkeys([*a["cases"], *b["cases"]]), only):
        if name not in a["cases"] or name not in b["cases"]:
            found = [f"only in {'A' if name in a['cases'] else 'B'}"]
        else:
            found = [
                f"rank {rank}: {key}: {text}"
                for rank, (x, y) in enumerate(zip(a["cases"][name], b["cases"][name], strict=True))
                for key, text in differences(x, y)
                if not any(fnmatch.fnmatch(key, pattern) for pattern in ignore)
            ]
        for line in found:
            print(f"{name}: {line}")
        equal, differ = equal + (not found), differ + bool(found)
    print(f"{equal} cases equal, {differ} differ")
    return 0 if equal and not differ else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser(
        "record", help="run the grid with the commhooks that is importable"
    )
    recording.add_argument("--output", type=Path)
    recording.add_argument(
        "--only", default="*", metavar="GLOB", help="cases by full name, e.g. '2 ranks: int8*'"
    )
    recording.add_argument(
        "--list", action="store_true", help="print the names of the cases, and run none"
    )
    comparing = commands.add_parser("compare", help="print the differences of two records")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--only", default="*", metavar="GLOB", help="cases by full name")
    comparing.add_argument(
        "--ignore", nargs="*", default=[], metavar="GLOB", help="keys, e.g. '*/debug log*'"
    )
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.a, given.b, given.only, given.ignore)
    if given.list:
        print("\n".join(fnmatch.filter(all_cases(), given.only)))
        return 0
    print(f"commhooks of {commhooks.__file__}, torch {torch.__version__}", flush=True)
    if given.output is None:
        parser.error("record: --output is missing")
    record(given.output, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
