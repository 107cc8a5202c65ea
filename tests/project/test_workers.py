"""No failure of a rank or of a program is lost, and a process that is forked is like one that is
started: every other test relies on it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import warm
from tests.support.compilers import needs_compiler
from tests.support.repository import REPOSITORY
from tests.support.workers import RanksFailed


def _sum(tensor: torch.Tensor, *, factor: int) -> tuple[int, int, torch.Tensor]:
    value = tensor * factor * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


def test_every_rank_runs_and_returns_its_result(run_ranks):
    tensor = torch.tensor([1.0, 2.0])
    results = run_ranks(_sum, tensor, factor=10, world_size=3)
    assert [result[:2] for result in results] == [(rank, 3) for rank in range(3)]
    assert all(torch.equal(value, 60 * tensor) for _, _, value in results)


def _fail(how: str) -> object:
    if dist.get_rank() == 1:
        if how == "exception":
            raise ValueError("only here")
        if how == "exit":
            sys.exit(0)
        if how == "result":
            return threading.Lock()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            threading.Event().wait()
        if how == "leak":
            os.environ["RANK"] = "0"
    if how in ("exception", "killed"):
        dist.all_reduce(torch.ones(1))  # the others are not left waiting
    return None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exception", "rank 1 raised ValueError: only here"),
        ("exit", "rank 1 raised SystemExit"),
        ("result", "cannot pickle"),
        ("killed", r"rank 1 died \(exit code -9\)"),
        ("hang", "rank 1 did not answer within 2 s"),
        ("leak", "rank 1 leaked: environment variable RANK: None became '0'"),
    ],
)
def test_a_failure_of_one_rank_fails_the_test_and_not_the_next(run_ranks, how, text):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=text):
        run_ranks(_fail, how, timeout_s=2 if how == "hang" else 120)
    assert time.monotonic() - begin < 60
    assert run_ranks(_fail, "nothing") == [None, None]


class _CannotBeRead:
    def __reduce__(self) -> Any:
        return _read, ()


def _read() -> None:
    raise ImportError("while reading the arguments")


def test_arguments_that_a_rank_cannot_read_fail_the_test(run_ranks):
    with pytest.raises(RanksFailed, match="while reading the arguments"):
        run_ranks(_fail, _CannotBeRead())


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_clean_env_keeps_the_arguments_and_the_exit_status(tmp_path, end, status):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nprint(sys.argv[1:], 'WORLD_SIZE' in os.environ, flush=True)\n{end}\n"
    )
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / "clean_env.py"),
        str(script),
        "--flag",
        "value",
    ]
    done = subprocess.run(
        command, env=dict(os.environ, WORLD_SIZE="8"), capture_output=True, text=True, timeout=280
    )
    assert (done.stdout, done.returncode) == ("['--flag', 'value'] False\n", status), done.stderr


@needs_compiler
@pytest.mark.parametrize(("variable", "loaded"), [("UNUSED", 1), ("CC", 0), ("XDG_CACHE_HOME", 0)])
def test_a_forked_process_keeps_the_c_kernels_only_with_the_same_compiler_and_cache(
    tmp_path, variable, loaded
):
    print_loaded = (
        "from commhooks.compressors.native import library\n"
        "print(library.load.cache_info().currsize)"
    )
    done = subprocess.run(
        [warm.python(), "-c", print_loaded],
        env={**os.environ, variable: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout == f"{loaded}\n", done.stderr
