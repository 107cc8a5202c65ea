"""Installs the wheel of dist/ into empty environments, one per front end, and trains on two ranks
in each.

    python -m build && python .ci/wheel_test.py                 # what `make wheel-test` does
    python .ci/wheel_test.py plain lightning --dist dist

Each environment is 1 to 2 GB, comes from the package index with the versions of
constraints-dev.txt, and is removed. The training is tests/project/outside/one_front_end.py, started
outside of the repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "project" / "outside" / "one_front_end.py"
FRONT_ENDS = ("plain", "lightning", "accelerate", "transformers")


def wheel_in(dist: Path) -> Path:
    found = sorted(dist.glob("commhooks-*.whl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise SystemExit(
            f"{dist} must hold one wheel and holds {names}: remove the folder and run `python -m"
            " build`"
        )
    return found[0].resolve()


def test(front_end: str, wheel: Path, folder: Path) -> None:
    """Install and train; raises CalledProcessError if either fails."""
    python = folder / "environment" / "bin" / "python"
    venv.create(folder / "environment", symlinks=True, with_pip=True)
    extra = "" if front_end == "plain" else f"[{front_end}]"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints-dev.txt",
    ]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environ = {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shutil.copy(SCRIPT, folder)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in (
        [*install, f"{wheel}{extra}"],
        [python, "-m", "pip", "check"],
        [folder / "environment" / "bin" / "commhooks", "hooks"],
        [*torchrun, folder / SCRIPT.name, front_end],
    ):
        words = [str(word) for word in command]
        print("$", *words[1:], flush=True)
        subprocess.run(words, cwd=folder, env=environ, check=True, timeout=1800)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "front_ends", nargs="*", metavar="FRONT_END", help=f"{', '.join(FRONT_ENDS)}; default: all"
    )
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="the folder with the wheel"
    )
    args = parser.parse_args()
    if unknown := set(args.front_ends) - set(FRONT_ENDS):
        parser.error(f"{unknown.pop()} is none of {', '.join(FRONT_ENDS)}")
    wheel = wheel_in(args.dist)
    for front_end in args.front_ends or FRONT_ENDS:
        start = time.monotonic()
        print(f"== {front_end}: {wheel.name} in an empty environment", flush=True)
        with tempfile.TemporaryDirectory(prefix="commhooks-wheel-") as folder:
            try:
                test(front_end, wheel, Path(folder))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                sys.exit(f"== {front_end}: FAILED: {error}")
        print(f"== {front_end}: passed in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
