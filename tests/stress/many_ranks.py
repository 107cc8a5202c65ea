"""What more ranks could break, with 16 and 32 of them on tiny models: run by `make test-many`.

At the end it prints how the cost of a hook grows with the ranks.
"""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from commhooks.comm import collectives
from tests.support.ddp_steps import mean_over_ranks, relative
from tests.support.dispatched import Dispatched
from tests.support.kinds import AUTO, KINDS
from tests.support.machines import Machine, lighthouse
from tests.support.sharded import attached, backward, random_gradients
from tests.support.training import Run, batch, flat

pytestmark = pytest.mark.timeout(600)
STEPS = 5
LOSSLESS = {"allreduce": 1e-6, "fp16": 2e-3, "bf16": 2e-2}
"""Relative error of the averaged gradients, where nothing is kept for later."""
JOB = Path(__file__).parents[1] / "support" / "member_job.py"
GROWTH: dict[str, dict[int, dict[str, float]]] = {}


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    for hook, sizes in GROWTH.items():
        print(f"\n{hook}")
        for ranks, row in sizes.items():
            print(f"  {ranks:3} ranks", *(f"{name} {value:g}" for name, value in row.items()))


def local_gradient(run: Run) -> torch.Tensor:
    """Compute what this rank alone would have as gradients in the next step."""
    model = copy.deepcopy(run.ddp.module)
    images, labels = batch(run.step, dist.get_rank())
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    return flat(parameter.grad for parameter in model.parameters())


def all_equal(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(tensor, other) for other in everyone)


def trained(name: str, ranks_per_node: int | None) -> dict[str, Any]:
    """Train, and return how much of the gradients is neither in the averages nor in the mean
    residual.
    """
    nodes = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
    run = KINDS[name].new(**nodes)
    missing = torch.zeros_like(run.weights(), dtype=torch.float64)
    sent = torch.zeros_like(missing)
    for _ in range(STEPS):
        expected = mean_over_ranks(local_gradient(run).double())
        run.train(1)
        missing += expected - run.gradients[-1].double()
        sent += expected
    saved = run.hook.state_dict("mean").get("parameters", {})
    for parameter, place in places(run).items():
        held = saved[parameter]["residual"] if parameter in saved else None
        if held is not None:
            missing[place] -= held.flatten().double()
    return {
        "lost": relative(missing, sent),
        "equal": all_equal(run.weights()) and all_equal(run.gradients[-1]),
        "compressed": run.hook.stats()["compressed_steps"],
    }


def places(run: Run) -> dict[str, slice]:
    """Where the elements of a parameter are in `Run.weights()`."""
    found, first = {}, 0
    for name, parameter in run.ddp.module.named_parameters():
        found[name] = slice(first, first + parameter.numel())
        first += parameter.numel()
    return found


@pytest.mark.parametrize("ranks_per_node", [None, 4])
@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].hook != AUTO])
def test_nothing_is_lost_among_16_ranks(
    run_ranks: Any, name: str, ranks_per_node: int | None
) -> None:
    if ranks_per_node is not None and KINDS[name].layouts_matter:
        pytest.skip("it compresses whole buckets, which nodes cannot share")
    ranks = run_ranks(trained, name, ranks_per_node, world_size=16, timeout_s=300)
    kind = KINDS[name]
    assert all(rank["equal"] for rank in ranks)
    if kind.keeps_residual or name in LOSSLESS:
        assert ranks[0]["lost"] < LOSSLESS.get(name, 1e-2 if kind.wrapper else 1e-4)
    assert (ranks[0]["compressed"] or 0) > 0 or not kind.learns


def resumed(name: str, saved: dict[str, Any] | None) -> dict[str, Any]:
    run = KINDS[name].new()
    if saved is not None:
        run.load(saved)
    run.train(3)
    return {"saved": run.save(residual="mean"), "equal": all_equal(run.weights())}


@pytest.mark.parametrize("name", ["powerSGD", "int4, native", "random_k"])
def test_a_run_goes_on_with_16_then_5_then_32_ranks(run_ranks: Any, name: str) -> None:
    saved = None
    for world_size in (16, 5, 32):
        ranks = run_ranks(resumed, name, saved, world_size=world_size, timeout_s=300)
        assert all(rank["equal"] for rank in ranks)
        saved = ranks[0]["saved"]
    assert saved["step"] == 9 and saved["hook"]["world_size"] == 32


def sharded(hook: str) -> list[torch.Tensor]:
    """Train on 4 replicas of 4 shards."""
    model, handle = attached(4, 4, hook, torch.float32)
    means = [backward(model, random_gradients(step, dtype=torch.float32)) for step in range(3)]
    handle.close()
    return [flat(mean.values()) for mean in means]


@pytest.mark.parametrize("hook", ["allreduce", "int8", "int4", "powerSGD"])
def test_replicas_of_shards_are_equal(run_ranks: Any, hook: str) -> None:
    ranks = run_ranks(sharded, hook, world_size=16, timeout_s=300)
    for step in range(3):
        assert all(torch.equal(rank[step], ranks[0][step]) for rank in ranks)


def rounds(hook: str) -> dict[str, Any]:
    run = Run.new(hook=hook, hook_options={"sync_every": 2})
    run.train(6)
    return {"equal": all_equal(run.weights()), "step": run.hook.stats()["step"]}


@pytest.mark.parametrize("hook", ["diloco", "local_sgd"])
def test_weights_are_averaged_over_32_ranks(run_ranks: Any, hook: str) -> None:
    ranks = run_ranks(rounds, hook, world_size=32, timeout_s=300)
    assert all(rank == {"equal": True, "step": 3} for rank in ranks)


def test_eight_machines_train_and_one_is_killed(tmp_path: Path) -> None:
    with lighthouse(wait_s=20.0) as address:
        machines = [
            Machine(JOB, address, tmp_path, name, every=2, wire="int4", steps=10_000)
            for name in "abcdefgh"
        ]
        try:
            first, *_, last = machines
            first.wait_for(lambda line: len(line.get("names", [])) == 8, 180)
            last.kill()
            first.wait_for(lambda line: line["what"] == "round" and len(line["names"]) == 7, 180)
            at = max(first.rounds)
            for machine in machines[:-1]:
                assert (
                    machine.round(at)["weights"]
                    == first.rounds[machine.round(at)["step"]]["weights"]
                )
        finally:
            for machine in machines:
                machine.kill()


def cost(hook: str, options: dict[str, Any] | None) -> dict[str, float]:
    """Measure what could grow with the ranks: from `attach` to the end of the fourth step."""
    process = psutil.Process()
    tables: list[int] = []
    gather = collectives._gather_equal

    def gathered(row: torch.Tensor, rows: torch.Tensor, *more: Any, **options: Any) -> Any:
        tables.append(rows.nbytes)
        return gather(row, rows, *more, **options)

    with (
        mock.patch.object(collectives, "_gather_equal", gathered),
        mock.patch.object(collectives, "gather_bytes", wraps=collectives.gather_bytes) as texts,
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as groups,
    ):
        before = process.memory_full_info().uss
        began = time.perf_counter()
        run = Run.new(hook=hook, hook_options=options)
        attached_s = time.perf_counter() - began
        run.train(3)
        with Dispatched() as fourth:
            run.train(1)
        memory = process.memory_full_info().uss - before
    stats = run.hook.stats()
    return {
        "attach ms": round(1000 * attached_s),
        "threads": process.num_threads(),
        "memory kB": round(memory / 1000),
        "handshakes": stats["handshakes"],
        "texts": texts.call_count,
        "tables": len(tables),
        "bytes of tables": sum(tables),
        "groups": groups.call_count,
        "operators": fourth.operators.total(),
        "collectives": stats["collectives_last_pass"],
        "bytes": stats["bytes_sent_last_pass"],
    }


@pytest.mark.parametrize(
    ("hook", "options", "operators"),
    [
        ("allreduce", None, 0),
        ("fp16", None, 0),
        # For each bucket and other rank: send, receive, add what it has sent.
        ("int8", {"start_iter": 1}, 20),
        ("int4", {"start_iter": 1}, 20),
        ("powerSGD", {"start_powerSGD_iter": 1}, 0),
        ("diloco", {"sync_every": 2}, 7),
    ],
)
def test_what_a_rank_does_does_not_grow_with_the_ranks(
    run_ranks: Any, hook: str, options: dict[str, Any] | None, operators: int
) -> None:
    """`operators`: what a further rank may cost."""
    GROWTH[hook] = {
        ranks: run_ranks(cost, hook, options, world_size=ranks, timeout_s=300)[0]
        for ranks in (2, 8, 32)
    }
    few, _, many = GROWTH[hook].values()
    for what in ("handshakes", "texts", "tables", "groups", "collectives"):
        assert many[what] == few[what], what
    assert many["operators"] <= few["operators"] + 30 * operators
    # A row for each rank, and nothing else.
    assert many["bytes of tables"] <= 16 * few["bytes of tables"]
