"""Each benchmark runs in its shortest form and writes rows, and where it runs. No figure is
judged.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.repository import REPOSITORY


def _can_limit_a_link() -> bool:
    if (
        not sys.platform.startswith("linux")
        or os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "tc")))
    ):
        return False
    # A container's root may not be allowed to.
    name = f"commhooks-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


ALONE = {
    "codec": "--ranks 4 --rounds 2",
    "gpu": "--device cpu --models tiny --ranks 1 --buckets one --batches small --markdown",
    "language_model": "--plot figures.png",
    "local_steps": "",
    "launches": "",
    "members": "--seconds 2 --alone-seconds 1 --kill-every 2 --jobs members torchft-DiLoCo"
    " --results rows.jsonl --plot figures.png",
    "memory": "",
    "shards_loss": "",
    "size": "--hooks powerSGD",
    "step_cost": "",
    "unequal": "",
}
OVER_A_LINK = {
    "link": "--plot figures.png",
    "members_link": "",
    "peers": "",
    "time_to_loss": "--plot figures.png",
}
needs_tun = pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs TUN")
needs_a_link = pytest.mark.skipif(not _can_limit_a_link(), reason="needs Linux, root, ip and tc")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *ALONE.items(),
        *(pytest.param(*benchmark, marks=needs_a_link) for benchmark in OVER_A_LINK.items()),
        pytest.param("link", "--rtt 5 --hooks noop", marks=[needs_a_link, needs_tun]),
    ],
)
def test_each_benchmark_runs_and_writes_rows(tmp_path: Path, name: str, options: str) -> None:
    file = tmp_path / "figures.json"
    command = [
        warm.python("matplotlib.figure", "sklearn.datasets"),
        str(REPOSITORY / "benchmarks" / f"{name}.py"),
    ]
    command += ["--quick", "--json", str(file), *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["benchmark"] == name and content["rows"]
    # under the table, so that nobody quotes figures without it
    assert content["machine"]["torch"] in done.stdout
    assert (tmp_path / "figures.png").exists() == ("--plot" in options)
