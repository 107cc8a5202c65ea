"""The multi-rank test tools themselves: a tool that lost a failure would make every other test worthless."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import clean_env
import pytest
import torch
import torch.distributed as dist

from tests.support import warm, worker_side
from tests.support.repository import REPOSITORY
from tests.support.workers import RanksFailed


def _rank_and_sum(tensor: torch.Tensor, *, factor: int) -> tuple[int, int, torch.Tensor]:
    value = tensor * factor * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_of_every_rank_and_all_reduce(run_ranks, world_size):
    tensor = torch.tensor([1.0, 2.0])
    results = run_ranks(_rank_and_sum, tensor, factor=10, world_size=world_size)
    assert [result[:2] for result in results] == [(rank, world_size) for rank in range(world_size)]
    for _, _, value in results:
        assert torch.equal(value, tensor * 10 * sum(range(1, world_size + 1)))


def _pid() -> int:
    return os.getpid()


def test_workers_are_kept(run_ranks):
    assert run_ranks(_pid) == run_ranks(_pid)
    assert os.getpid() not in run_ranks(_pid)


def _draw() -> tuple[float, int, bool]:
    return torch.rand(()).item(), torch.get_num_threads(), dist.is_initialized()


def test_every_task_starts_alike(run_ranks):
    first = run_ranks(_draw, init=False)
    assert first == run_ranks(_draw, init=False)
    assert first[0] == first[1]
    assert first[0][1:] == (1, False)


def _fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise KeyError("only here")
    return "fine"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_is_reported(run_ranks, rank):
    with pytest.raises(RanksFailed, match=rf"rank {rank} raised KeyError: 'only here'") as raised:
        run_ranks(_fail_on, rank)
    assert set(raised.value.errors) == {rank}
    assert raised.value.errors[rank].type_name == "KeyError"
    assert "in _fail_on" in str(raised.value)


def _fail_beside_a_collective() -> None:
    if dist.get_rank() == 1:
        raise ValueError("before the collective")
    dist.all_reduce(torch.ones(1))


def test_a_failed_rank_ends_the_collectives_of_the_others(run_ranks):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 raised ValueError: before the collective") as raised:
        run_ranks(_fail_beside_a_collective)
    assert set(raised.value.errors) == {0, 1}
    assert time.monotonic() - begin < 20  # sooner than the time limit of the group


def _result_that_cannot_be_sent() -> object:
    return threading.Lock()


def test_a_result_that_cannot_be_sent_is_an_error(run_ranks):
    with pytest.raises(RanksFailed, match="cannot pickle"):
        run_ranks(_result_that_cannot_be_sent)


def _exit() -> None:
    sys.exit(3)


def test_sys_exit_is_an_error_and_the_worker_lives_on(run_ranks):
    before = run_ranks(_pid)
    with pytest.raises(RanksFailed, match="rank 0 raised SystemExit"):
        run_ranks(_exit)
    assert run_ranks(_pid) == before


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_a_hang_is_cut_and_the_next_task_works(run_ranks):
    before = run_ranks(_pid)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 did not answer within 5 s") as raised:
        run_ranks(_hang_on_rank_1, timeout_s=5)
    assert time.monotonic() - begin < 14
    assert "in _hang_on_rank_1" in str(raised.value)  # where it hung
    assert "rank 0" not in str(raised.value)
    assert not set(before) & set(run_ranks(_pid))
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_killed_worker_is_reported_and_the_next_task_works(run_ranks):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 died \(exit code -9\)"):
        run_ranks(_die_on_rank_1)
    assert time.monotonic() - begin < 20
    assert len(run_ranks(_pid)) == 2


def test_a_worker_that_died_between_two_tasks_is_reported(run_ranks, worker_pool):
    run_ranks(_pid)
    os.kill(worker_pool.pids[0], signal.SIGKILL)
    with pytest.raises(RanksFailed, match=r"rank 0 died \(exit code -9\)"):
        run_ranks(_pid)
    assert len(run_ranks(_pid)) == 2


class _Arrives:
    """An argument that rank 1 cannot read, or reads late."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return _arrive, (self.how,)


def _arrive(how: str) -> None:
    worker_side.GROUP_TIMEOUT_S = 8.0 if how == "late" else 1.0
    if Path(sys.argv[-1]).name == "stack-1.txt":
        if how == "late":
            time.sleep(9)
        else:
            raise ImportError("only on rank 1")


def _sum_of(nothing: None) -> float:
    return float(_rank_and_sum(torch.ones(()), factor=1)[2])


def test_a_rank_that_arrives_late_is_waited_for(run_ranks, worker_pool):
    assert run_ranks(_sum_of, _Arrives("late")) == [3.0, 3.0]
    worker_pool.kill()  # its workers have another limit now


def test_a_rank_that_never_joins_does_not_spoil_the_next_task(run_ranks):
    """The others give up, but torch counts the attempt; see `_next_group_is_misnamed`."""
    with pytest.raises(RanksFailed, match="only on rank 1"):
        run_ranks(_sum_of, _Arrives("broken"))
    assert run_ranks(_sum_of, None) == [3.0, 3.0]


def _leak(kind: str) -> None:
    if kind == "environment":
        os.environ["RANK"] = "0"
        del os.environ["OMP_NUM_THREADS"]
    elif kind == "what torch sets for good":
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    elif kind == "dtype":
        torch.set_default_dtype(torch.float64)
    elif kind == "grad":
        torch.set_grad_enabled(False)
    elif kind == "threads":
        torch.set_num_threads(2)
    elif kind == "precision":
        torch.set_float32_matmul_precision("medium")
    elif kind == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif kind == "thread":
        threading.Thread(target=threading.Event().wait, name="left-behind").start()
    elif kind == "group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    "kind, sentence",
    [
        ("environment", "environment variable RANK: None became '0'"),
        ("environment", "environment variable OMP_NUM_THREADS: '1' became None"),
        ("dtype", "default dtype: torch.float32 became torch.float64"),
        ("grad", "grad mode: True became False"),
        ("threads", "number of threads: 1 became 2"),
        ("precision", "float32 matmul precision: highest became medium"),
        ("deterministic", "deterministic algorithms: False became True"),
        ("thread", "non-daemon thread 'left-behind'"),
        ("group", "a process group"),
    ],
)
def test_leaks_are_reported_and_undone(run_ranks, kind, sentence):
    with pytest.raises(RanksFailed, match=f"rank 0 leaked: {sentence}"):
        run_ranks(_leak, kind, world_size=1, init=False)
    assert run_ranks(_leak, "nothing", world_size=1, init=False) == [None]


def test_what_torch_sets_for_good_is_no_leak(run_ranks, worker_pool):
    assert run_ranks(_leak, "what torch sets for good", world_size=1, init=False) == [None]
    worker_pool.kill()  # the tests that follow start without it


def test_world_sizes_that_the_pool_does_not_have(run_ranks):
    with pytest.raises(ValueError, match="world_size=7: the pool has 1 to 6 workers"):
        run_ranks(_pid, world_size=7)


def test_the_fixtures_of_the_main_process_can_fail(tmp_path):
    """Runs pytest on a file whose first test leaks a process group and variables, and whose second looks for them."""
    (tmp_path / "test_leaks.py").write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "def test_leaks():\n"
        "    assert 'SLURM_JOB_ID' not in os.environ and os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "    os.environ['LOCAL_RANK'] = '1'\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "def test_next():\n"
        "    assert 'LOCAL_RANK' not in os.environ\n"
        "    assert not dist.is_initialized()\n"
    )
    env = dict(os.environ, SLURM_JOB_ID="17", CUDA_VISIBLE_DEVICES="0")
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "examples")])
    command = [warm.python(), "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "test_leaks.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert "ERROR at teardown of test_leaks" in done.stdout, done.stdout + done.stderr
    assert "left a torch.distributed process group behind" in done.stdout
    assert "2 passed" in done.stdout and "1 error" in done.stdout


def test_clean_env_takes_out_what_launchers_set():
    dirty = {
        "SLURM_NTASKS": "8", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1", "PL_GLOBAL_SEED": "1",
        "ACCELERATE_USE_FSDP": "true", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    kept = {"PATH": "/bin", "RANKING": "1", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "8", "HF_HOME": "/home"}
    assert clean_env.cleaned(dirty | kept, "/tmp/hf") == {
        "PATH": "/bin", "RANKING": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HOME": "/tmp/hf",
    }  # fmt: skip
    assert clean_env.cleaned(kept, "/tmp/hf", keep_cuda=True)["CUDA_VISIBLE_DEVICES"] == "3"


def _run_clean(tmp_path: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(REPOSITORY / "examples" / "clean_env.py"), str(tmp_path / "script.py"), *args]
    env = dict(os.environ, SLURM_JOB_ID="17", WORLD_SIZE="8")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_clean_env_runs_a_script(tmp_path):
    script = "import os, sys\nprint(sys.argv[1:], sorted(set(os.environ) & {'SLURM_JOB_ID', 'WORLD_SIZE'}))\n"
    script += "print(os.environ['HF_HOME']); assert os.path.isdir(os.environ['HF_HOME']); sys.exit(7)\n"
    done = _run_clean(tmp_path, script, "--flag", "value")
    first, hf_home = done.stdout.splitlines()
    assert first == "['--flag', 'value'] []"
    assert done.returncode == 7
    assert not Path(hf_home).exists()  # temporary


def test_clean_env_reports_a_killed_script(tmp_path):
    assert _run_clean(tmp_path, "import os\nos.kill(os.getpid(), 9)\n").returncode == 137
