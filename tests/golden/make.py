"""Makes tests/golden/payloads.pt again, after a change of the format.

python tests/golden/make.py
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS.parent))

import torch  # noqa: E402

from tests.golden import golden_runs  # noqa: E402
from tests.support.workers import WorkerPool  # noqa: E402


def main() -> None:
    pool = WorkerPool()
    try:
        saved = pool.run(golden_runs.save_all)
        resumed = pool.run(golden_runs.resume_all, saved)[0]
    finally:
        pool.close()
    # Gradients are averages, equal on all ranks.
    after = {kind: outcome["gradients"] for kind, outcome in resumed.items()}
    torch.save({"saved": saved, "gradients": after}, golden_runs.FILE)


if __name__ == "__main__":
    main()
