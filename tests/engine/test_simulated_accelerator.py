"""Whole trainings on a simulated accelerator: everything is ordered, and no memory is freed while
it may be used.

`python -m tests.stress.waits` takes each wait of the packages out in turn; every such mutant must
fail here.
"""

import dataclasses
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.compressors.base import Exchange, Send, State, StepInfo
from commhooks.compressors.cast import Stateless
from commhooks.engine.backward_pass import BackwardPass
from commhooks.gradients.loss_scale import ScaleOf
from commhooks.options import HookConfig
from tests.support import sharded
from tests.support import simulated_accelerator as simulation
from tests.support.cuda_stand_ins import Stream
from tests.support.ddp_steps import descend, process_group_of_one, wrap
from tests.support.features import fully_shard_on_gloo
from tests.support.simulated_accelerator import DEVICE, Accelerator, simulated_accelerator
from tests.support.training import Run

pytestmark = pytest.mark.timeout(120)

QUANTIZED = {"block_size": 32, "start_iter": 1}
POWERSGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
DILOCO = {"sync_every": 2, "start_iter": 0, "outer_momentum": 0.5}
HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {"hook": "allreduce"},
    "bf16": {"hook": "bf16"},
    "powerSGD": {"hook": "powerSGD", "hook_options": POWERSGD},
    "powerSGD, bf16": {"hook": "powerSGD", "hook_options": POWERSGD, "wrapper": "bf16"},
    "powerSGD, cold": {"hook": "powerSGD", "hook_options": POWERSGD | {"warm_start": False}},
    "batched": {"hook": "batched_powerSGD", "hook_options": POWERSGD},
    "int4": {"hook": "int4", "hook_options": QUANTIZED},
    "auto": {"hook": "tests.support.prescribed_auto:PrescribedAutoCompressor"},
    "random_k": {
        "hook": "examples.random_k:RandomKCompressor",
        "hook_options": {"share": 0.2, "start_iter": 1},
    },
    "diloco": {"hook": "diloco", "hook_options": DILOCO | {"wire": "float32"}},
    "diloco, int4": {"hook": "diloco", "hook_options": DILOCO | {"fragments": 2}},
}


def _model() -> nn.Module:
    """Three matrices, each in a bucket of its own."""
    torch.manual_seed(7)
    layers = [nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def _new(hook: str, **more: Any) -> Run:
    return Run.new(_model().to(DEVICE), **HOOKS[hook], **more)


HOST_WAITS = {
    "powerSGD, cold": {"state.py"},  # each step draws its own Q, by the number of the step
    "random_k": {"state.py"},  # each step draws its own elements
    # At the end of a round, where the ranks compare buffers, and the workspace of the wire is made
    # anew.
    "diloco": {"state.py", "common_state.py"},
    "diloco, int4": {"state.py", "common_state.py", "kernels.py", "mean.py"},
}
"""The modules in which the host waits for the accelerator in steady state. No other hook makes it
wait.
"""


LATE: dict[str, int] = {
    "powerSGD": 0,
    "int4": 1,
    "diloco, int4": 0,
    "saves": 0,
    "fails in a hook": 0,
}
"""Seeds of the trainings whose operators run late, too: both kinds of orders. The others are
examined for faults.
"""
OTHER_NUMBERS = "late operators give other numbers"


def _bits(numbers: Any) -> Any:
    """Copy numbers to the host, as something that `==` compares, also where they are NaN."""
    if isinstance(numbers, torch.Tensor):
        return numbers.dtype, numbers.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(numbers, dict):
        return {key: _bits(value) for key, value in numbers.items()}
    return [_bits(value) for value in numbers] if isinstance(numbers, list) else numbers


def _wrong(
    train: Callable[[Accelerator], Any], seed: int | None = None, expected: Any = None
) -> list[str]:
    """Find what is wrong with a training: faults, and other numbers if its operators run late.

    Args:
        train: trains, and returns the numbers.
        seed: of the order in which the operators run late; None: faults only.
        expected: the numbers on the CPU, if they must be the same.
    """

    def run(late: int | None) -> tuple[Any, list[str]]:
        with simulated_accelerator(late) as accelerator:
            numbers = _bits(train(accelerator))
            gc.collect()
        return numbers, accelerator.faults

    numbers, faults = run(None)
    assert expected in (None, numbers)
    if seed is None:
        return faults
    try:
        other = [OTHER_NUMBERS] * (run(seed)[0] != numbers)
    except Exception as error:  # of wrong numbers
        other = [f"{OTHER_NUMBERS}: {error!r}"]
    return faults + other


def _trained(hook: str, seed: int | None, more: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is wrong with a training, and what the host waited for in its last two steps."""
    waits: list[str] = []

    def train(accelerator: Accelerator) -> Any:
        run = _new(hook, **more).train(3 if hook == "auto" else 2)  # until every buffer is made
        del accelerator.host_waits[:]
        run.train(2)
        waits.extend(accelerator.host_waits)
        run.hook.stats()
        return [run.weights(), run.gradients, run.save()["hook"].get("parameters")]

    return _wrong(train, seed), waits


def _check(faults_of_ranks: Any) -> None:
    """Check what the ranks have found wrong."""
    for wrong in faults_of_ranks:
        print(*wrong, sep="\n")  # all of it, for tests.stress.waits
        assert wrong == []


def _check_hook(results: Any, hook: str) -> None:
    _check(wrong for wrong, _ in results)
    for _, waits in results:
        assert _modules(waits) == HOST_WAITS.get(hook, set()), waits


@pytest.mark.parametrize("hook", HOOKS)
def test_training_with_every_hook_is_ordered(run_ranks: Any, hook: str) -> None:
    _check_hook(run_ranks(_trained, hook, LATE.get(hook), {}), hook)


DELAYED = commhooks.DiLoCo(sync_every=4, fragments=2, delay=1, outer_lr=0.7, outer_momentum=0.5)
"""Sends in the first and third step of a round, and arrives in the second and fourth."""


def _trained_with_diloco(config: commhooks.DiLoCo) -> Any:
    run = Run.new(_model().to(DEVICE), hook=config).train(5)
    saved = run.save(residual="mean")  # ends a fragment in flight
    run.train(1).load(saved).train(3)  # drops one
    norm = run.hook.stats()["outer_gradient_norm"]
    with torch.no_grad():
        # one arrives, one is discarded
        run.ddp.module[1].bias[0].fill_(torch.nan if dist.get_rank() == 0 else 0.5)
    run.train(5).hook.close()  # drops one
    assert run.hook.stats()["nonfinite_steps"] > 0  # discarded
    return [run.weights(), run.gradients, saved["hook"]["parameters"], norm]


def _trained_here_and_there(config: commhooks.DiLoCo, seed: int | None) -> list[str]:
    return _wrong(lambda _: _trained_with_diloco(config), seed, _bits(_trained_with_diloco(config)))


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        (DELAYED, 1),
        (dataclasses.replace(DELAYED, offload=False), None),
        (
            dataclasses.replace(DELAYED, sync_every=1, fragments=1, delay=0),
            None,
        ),  # a step after a save of the mean
    ],
    ids=["in host memory", "on the device", "without a delay"],
)
def test_diloco_computes_what_it_computes_on_the_cpu(
    run_ranks: Any, config: Any, seed: int | None
) -> None:
    _check(run_ranks(_trained_here_and_there, config, seed))


def _waits_of_a_round_with_delay() -> list[set[str]]:
    with simulated_accelerator() as accelerator:
        config = dataclasses.replace(DELAYED, sync_every=8, delay=2)
        run = Run.new(_model().to(DEVICE), hook=config).train(8)
        all_waits = []
        for _ in range(8):
            del accelerator.host_waits[:]
            run.train(1)
            all_waits.append(_modules(accelerator.host_waits))
        return all_waits


def test_the_host_does_not_wait_while_a_fragment_is_in_flight(run_ranks: Any) -> None:
    workspace, outcome = {"kernels.py", "mean.py"}, {"state.py"}
    for waits in run_ranks(_waits_of_a_round_with_delay):
        assert waits == [
            set(),
            workspace,
            set(),
            outcome,
            set(),
            workspace,
            set(),
            outcome | {"common_state.py"},
        ]


@pytest.mark.parametrize("hook", ["powerSGD", "int4", "bf16"])
def test_training_between_nodes_is_ordered(run_ranks: Any, hook: str) -> None:
    _check_hook(run_ranks(_trained, hook, None, {"ranks_per_node": 2}, world_size=4), hook)


def _modules(waits: list[str]) -> set[str]:
    return {wait.partition(" (")[2].partition(":")[0] for wait in waits}


class _Words(nn.Module):
    """With a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words).mean(1))


def _trained_on_words(hook: str) -> list[str]:
    with simulated_accelerator() as accelerator:
        ddp = wrap(_Words().to(DEVICE))
        commhooks.attach(ddp, hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randint(0, 20, (4, 6)).to(DEVICE)).square().mean().backward()
            descend(ddp)
        return accelerator.faults


@pytest.mark.parametrize("hook", ["fp16", "powerSGD"])
def test_training_with_sparse_gradients_is_ordered(run_ranks: Any, hook: str) -> None:
    _check(run_ranks(_trained_on_words, hook))


def _trained_in_shards() -> list[str]:
    def train(accelerator: Accelerator) -> Any:
        mesh = sharded.mesh_of(2, 2)
        model = sharded.shard(sharded.Prescribed(torch.float32).to(DEVICE), mesh["shard"])
        attached = commhooks.attach(model, **HOOKS["powerSGD"], replicate_group=mesh["replicate"])
        for step in range(4):
            gradients = {
                n: g.to(DEVICE)
                for n, g in sharded.random_gradients(step, dtype=torch.float32).items()
            }
            model.zero_grad(set_to_none=True)
            del accelerator.host_waits[:]
            if step == 2:
                with sharded.accumulating(model, "set_requires_all_reduce"):
                    model(gradients).backward(), model(gradients).backward()
            model(gradients).backward()
            assert accelerator.host_waits == [] or step < 3
            descend(model)
        attached.stats()
        return [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]

    return _wrong(train, seed=0)


@fully_shard_on_gloo
def test_training_on_shards_is_ordered(run_ranks: Any) -> None:
    _check(run_ranks(_trained_in_shards, world_size=4))


@dataclass(frozen=True, kw_only=True)
class Sums(HookConfig):
    hook_name: ClassVar[str] = "sums"

    op: str = "sum"


class SumsCompressor(Stateless[Sums]):
    """Without learned state. What it made before its Send is needed after it."""

    Config = Sums

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        half = flat.half()
        share = torch.full_like(flat, 1 / step.world_size)
        if self.config.op == "sum":
            total = yield Send(half, last=True)
        else:
            total = (yield Send(half, op="gather", last=True)).sum(0)
        flat.copy_(total).mul_(share)
        return None


def _trained_with_sums(op: str) -> list[str]:
    with simulated_accelerator() as accelerator:
        commhooks.register_compressor(SumsCompressor)
        Run.new(_model().to(DEVICE), hook=Sums(op=op)).train(3)
        return accelerator.faults


@pytest.mark.parametrize("op", ["sum", "gather"])
def test_a_custom_compressor_without_learned_state_is_ordered(run_ranks: Any, op: str) -> None:
    _check(run_ranks(_trained_with_sums, op))


def _trained_with_a_scaler() -> list[str]:
    def train(accelerator: Accelerator) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        run = _new("powerSGD", loss_scale=ScaleOf(lambda: scaler, DEVICE))
        run.scaler = scaler
        bias = run.train(3).ddp.module[1].bias.detach()  # type: ignore[union-attr, operator]
        kept = bias.clone()
        bias.fill_(torch.nan)
        run.train(1)  # is skipped
        bias.copy_(kept)
        assert run.train(2).hook.stats()["nonfinite_steps"] == 1
        return [scaler.get_scale(), run.weights(), run.gradients]

    return _wrong(train)


def test_training_with_a_grad_scaler_is_ordered(run_ranks: Any) -> None:
    _check(run_ranks(_trained_with_a_scaler))


# ---- in the middle of a backward pass ------------------------------------------------------------


def _interrupted(run: Run, act: Callable[[], object]) -> None:
    """A step that calls `act` when the first bucket has been sent."""
    handle = run.ddp.module[3].register_full_backward_hook(lambda *_: act())  # type: ignore[index]
    try:
        run.train(1)
    finally:
        handle.remove()


def _saves_in_a_thread(run: Run, accelerator: Accelerator, how: str) -> Any:
    saved: list[Any] = []

    def save() -> None:
        thread = threading.Thread(target=lambda: saved.append(run.hook.state_dict(how)))
        thread.start()
        thread.join()

    _interrupted(run, save)
    save()  # nothing has made the host wait since the commit
    assert [payload["step"] for payload in saved] == [3, 4] and saved[0]["exact"]
    return [payload["parameters"] for payload in saved]


def _reads_norms_elsewhere(run: Run, accelerator: Accelerator) -> Any:
    run.optimizer.zero_grad()  # gradients are the caller's to wait for
    run.hook.state_dict("mean")  # the codec's stream copies the means
    with accelerator.cuda.on(Stream(name="the reader's stream")):
        return run.hook.norms()["residual_norm"]


class _Interrupt(Exception):
    pass


def _fail() -> None:
    raise _Interrupt


def _is_abandoned(run: Run, accelerator: Accelerator) -> None:
    with pytest.raises(_Interrupt):
        _interrupted(run, _fail)
    run.optimizer.zero_grad()
    _begins_anew(run)


def _fails_in_a_hook(run: Run, accelerator: Accelerator) -> Any:
    with (
        mock.patch.object(BackwardPass, "drain", side_effect=_Interrupt),
        pytest.raises(_Interrupt),
    ):
        run.train(1)
    run.optimizer.zero_grad(set_to_none=False)  # the gradients are in the buckets
    zeros = [parameter.grad for parameter in run.ddp.parameters()]
    _begins_anew(run)
    return zeros


def _begins_anew(run: Run) -> None:
    """With a new DDP, because one whose pass did not end is of no use."""
    saved = run.hook.state_dict("per_rank")
    run.hook.close()
    new = Run.new(run.ddp.module, hook=run.hook.name, hook_options=run.hook.options)
    new.hook.load_state_dict(saved)
    run.ddp, run.hook, run.optimizer = new.ddp, new.hook, new.optimizer


def _is_dropped(run: Run, accelerator: Accelerator) -> None:
    with pytest.raises(_Interrupt):
        _interrupted(run, _fail)
    del run.ddp, run.optimizer, run.hook
    gc.collect()


def _loads(run: Run, accelerator: Accelerator) -> None:
    run.load(run.save())


def _trains_on_another_stream(run: Run, accelerator: Accelerator) -> None:
    side = Stream(name="the stream of the training")
    side.wait_stream(accelerator.cuda.default)
    with accelerator.cuda.on(side):
        run.train(2)
    accelerator.cuda.default.wait_stream(side)


def _is_checked(run: Run, accelerator: Accelerator) -> None:
    run.hook.synchronize()
    assert run.hook.stats()["backward_passes"] == 3


EVENTS: dict[str, Callable[..., Any]] = {
    "saves": lambda *arguments: _saves_in_a_thread(*arguments, "per_rank"),
    "saves the mean": lambda *arguments: _saves_in_a_thread(*arguments, "mean"),
    "reads norms elsewhere": _reads_norms_elsewhere,
    "is abandoned": _is_abandoned,
    "fails in a hook": _fails_in_a_hook,
    "is dropped in the middle": _is_dropped,
    "loads": _loads,
    "trains on another stream": _trains_on_another_stream,
    "is checked": _is_checked,
}


def _trained_with(event: str) -> list[str]:
    def train(accelerator: Accelerator) -> Any:
        run = _new("powerSGD", ddp={"gradient_as_bucket_view": True}).train(3)
        seen = EVENTS[event](run, accelerator)
        if not hasattr(run, "ddp"):
            return run.gradients
        run.train(2).hook.stats()
        return [seen, run.weights(), run.gradients]

    return _wrong(train, LATE.get(event))


@pytest.mark.parametrize("event", EVENTS)
def test_training_stays_ordered_when_it(run_ranks: Any, event: str) -> None:
    _check(run_ranks(_trained_with, event))


# ---- what the simulation finds -------------------------------------------------------------------


def _reads_of_another_stream(accelerator: Accelerator, waits: bool, part: slice) -> list[str]:
    tensor = torch.zeros(8, device=DEVICE)
    side = Stream(name="the other stream")
    side.wait_stream(accelerator.cuda.default)
    tensor[4:].fill_(1)
    if waits:
        side.wait_stream(accelerator.cuda.default)
    with accelerator.cuda.on(side):
        tensor[part].sum().item()
    return accelerator.faults


@pytest.mark.parametrize(
    ("waits", "part", "faulty"),
    [(False, slice(3, 5), True), (True, slice(3, 5), False), (False, slice(0, 4), False)],
    ids=["no wait", "a wait", "other bytes"],
)
def test_the_simulator_finds_a_read_that_does_not_wait(
    waits: bool, part: slice, faulty: bool
) -> None:
    with simulated_accelerator() as accelerator:
        faults = _reads_of_another_stream(accelerator, waits, part)
    assert [fault.partition(" (")[0] for fault in faults] == [
        "aten::sum on the other stream reads"
    ] * faulty
    assert all(
        "which aten::fill_ on the default stream writes: nothing orders them" in fault
        for fault in faults
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("waits", [False, True])
def test_late_operators_make_a_missing_wait_a_wrong_number(waits: bool, seed: int) -> None:
    with simulated_accelerator(late=seed) as accelerator:
        tensor = torch.zeros(8, device=DEVICE)
        side = Stream(name="the other stream")
        side.wait_stream(accelerator.cuda.default)
        tensor.add_(1)
        if waits:
            side.wait_stream(accelerator.cuda.default)
        with accelerator.cuda.on(side):
            total = tensor.sum().item()
    assert total == (8 if waits else 0)


@pytest.mark.parametrize("kept", [False, True])
def test_it_finds_memory_that_is_freed_too_early(kept: bool) -> None:
    with simulated_accelerator() as accelerator:
        tensor = torch.zeros(8, device=DEVICE)
        side = Stream(name="the other stream")
        side.wait_stream(accelerator.cuda.default)
        with accelerator.cuda.on(side):
            tensor.add_(1)
        if kept:
            tensor.record_stream(side)  # type: ignore[arg-type]
        del tensor
    assert [
        "is freed while the other stream may use it" in fault for fault in accelerator.faults
    ] == [True] * (not kept)


@pytest.mark.parametrize("waits", ["work", "future", "a future without a device", "not at all"])
def test_it_finds_an_answer_that_nobody_has_waited_for(waits: str) -> None:
    with process_group_of_one(), simulated_accelerator() as accelerator:
        tensor = torch.zeros(8, device=DEVICE)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if waits == "work":
            work.wait()
        elif waits == "future":
            work.get_future().wait()
        elif waits == "a future without a device":
            future: torch.futures.Future[Any] = torch.futures.Future()
            work.get_future().then(lambda done: future.set_result(done.value()))
            future.wait()
        tensor.add_(1)
    faulty = ["c10d::allreduce_ on the stream of group" in fault for fault in accelerator.faults]
    assert faulty == [True] * (waits in ("a future without a device", "not at all"))


@pytest.mark.parametrize("waits", [False, True])
def test_it_finds_a_copy_that_the_host_reads_too_early(waits: bool) -> None:
    with simulated_accelerator() as accelerator:
        copied = torch.ones(2, device=DEVICE).to("cpu", non_blocking=True)
        event = torch.Event(DEVICE)
        event.record(torch.accelerator.current_stream())
        if waits:
            event.synchronize()
        copied.tolist()
    faulty = [
        "tolist reads on the host what a copy may not have written yet" in fault
        for fault in accelerator.faults
    ]
    assert faulty == [True] * (not waits)


def test_it_counts_what_the_host_waits_for() -> None:
    with (
        simulated_accelerator() as accelerator,
        mock.patch.object(simulation, "_place", lambda: ("here", True)),
    ):
        on_host, on_device = torch.zeros(3), torch.zeros(3, device=DEVICE)
        on_host.tolist(), on_host.sum().item(), on_device * 2, on_device.add_(on_host[0])
        assert accelerator.host_waits == []
        (
            on_device.tolist(),
            on_device.sum().item(),
            on_device[on_device > 0],
            on_device.cpu(),
            on_host.to(DEVICE),
        )
        on_device.copy_(on_host)
    assert len(accelerator.host_waits) == 6
