"""Makes the files of tests/golden/v<version>: run once, when a version of the payload is born, and never again for it.

    python tests/golden/make.py

A change of the format needs another `VERSION`, another folder and a reader of the old one; the files of older versions
stay as they are.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS.parent))

import torch  # noqa: E402

from commhooks.checkpoint.checks import VERSION  # noqa: E402
from tests.support import golden_runs  # noqa: E402
from tests.support.workers import WorkerPool  # noqa: E402


def main() -> None:
    folder = golden_runs.FOLDER / f"v{VERSION}"
    if folder.exists():
        sys.exit(f"{folder} exists: what older programs have written cannot be made again")
    folder.mkdir()
    pool = WorkerPool()
    try:
        for rank, files in enumerate(pool.run(golden_runs.save_all)):
            for kind, content in files.items():
                if rank == 0 or kind in golden_runs.OF_EACH_RANK:
                    torch.save(content, golden_runs.path(kind, rank, VERSION))
        torch.save(only_gradients(pool.run(golden_runs.resume_all, VERSION)[0]), folder / "expected.pt")
    finally:
        pool.close()


def only_gradients(kinds: dict) -> dict:
    """Gradients are averages, the same on every rank; memory is compared with what is in the files."""
    return {kind: found["gradients"] for kind, found in kinds.items()}


if __name__ == "__main__":
    main()
