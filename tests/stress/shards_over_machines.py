"""Two machines of two ranks, joined by a slow link, train one model that is sharded over all of
them; a rank is killed, and the run resumes. Run by `make test-many`; needs root, `ip` and `tc`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import Hosts, hosts, missing
from tests.support.repository import REPOSITORY, TESTS

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=str(missing())),
]
RATE = "100mbit"
STEPS = 23  # of an epoch
LIMIT_S = 500  # of a run, on a busy machine


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    with hosts("ab") as both:
        for name in both.names:
            link = ["tc", "-n", both.namespace(name), "qdisc", "add", "dev", both.interface(name)]
            limit = ["root", "tbf", "rate", RATE, "burst", "64kb", "latency", "200ms"]
            subprocess.run([*link, *limit], check=True)
        yield both


def run(machines: Hosts, front: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the job on both machines; return what the ranks have printed."""
    processes = []
    for number, name in enumerate(machines.names):
        launcher = [
            *machines.command(name),
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--node-rank={number}",
            "--nproc-per-node=2",
            f"--master-addr={machines.address('a')}",
            "--master-port=29500",
        ]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": machines.interface(name),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        output = open(folder / f"{name}{len(more)}.log", "w+")  # noqa: SIM115
        job = [str(TESTS / "stress" / "shards_job.py"), front, str(folder), *more]
        process = subprocess.Popen(
            [*launcher, *job], env=environment, cwd=folder, stdout=output, stderr=output
        )
        processes.append((process, output))
    deadline = time.monotonic() + LIMIT_S
    lines = []
    try:
        for process, output in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
            output.seek(0)
            text = output.read()
            assert process.returncode == 0 or "--dies-at" in more, text
            lines += [json.loads(line) for line in text.splitlines() if line.startswith('{"rank"')]
    finally:
        for process, output in processes:
            process.terminate()
            output.close()
    return lines


@pytest.mark.parametrize("front", ["lightning", "accelerate", "transformers"])
def test_a_killed_run_resumes_with_the_same_bits(
    machines: Hosts, tmp_path: Path, front: str
) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    through.mkdir()
    killed.mkdir()
    whole = run(machines, front, through)
    assert run(machines, front, killed, "--dies-at", str(STEPS + 5)) == []
    resumed = run(machines, front, killed, "--resume")
    assert len(whole) == len(resumed) == 4
    assert {line["weights"] for line in (*whole, *resumed)} == {whole[0]["weights"]}
    for line in whole:
        sent = line["shards"]
        assert line["right"] > 0.85
        assert 0 < sent["bytes_inside_nodes"]
        assert 0 < sent["bytes_sent"] < 0.35 * sent["bytes_uncompressed"]
    print(f"\n{front}: {whole[0]['right']:.1%} of the test images, {whole[0]['shards']}")
