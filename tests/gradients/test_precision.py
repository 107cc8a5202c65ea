"""The hook computes in full precision whatever the user's switches say, and leaves them alone."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd import cpu
from commhooks.gradients import precision
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.precision import GlobalSwitch
from tests.support.dispatched import Dispatched
from tests.support.features import switches_per_library
from tests.support.kernels import computing_with
from tests.support.models import EVERY_PARAMETER, Gradients, bits_equal, random_gradients, wrap
from tests.support.training import Run

SHAPES = {"wide": (64, 300), "tall": (300, 64), "conv": (32, 16, 3, 3), "bias": (300,)}
STEPS = 2

# A switch per library for the precision of float32 products; torch 2.8 has one for all libraries.
PER_LIBRARY = (
    {"mkldnn": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}  # type: ignore[attr-defined]
    if hasattr(torch.backends.mkldnn, "matmul")
    else {}
)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Puts every switch back that a case sets."""
    legacy = torch.get_float32_matmul_precision()
    new = [(switch, switch.fp32_precision) for switch in PER_LIBRARY.values()]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(legacy)
        for switch, before in new:
            switch.fp32_precision = before


def _backend(switch: Any, value: str) -> Callable[[], None]:
    return lambda: setattr(switch, "fp32_precision", value)


CASES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "precision high": lambda: torch.set_float32_matmul_precision("high"),
    "precision medium": lambda: torch.set_float32_matmul_precision("medium"),
    **{
        f"{library} {value}": _backend(PER_LIBRARY[library], value)
        for library, value in (("mkldnn", "bf16"), ("mkldnn", "tf32"), ("cuda", "tf32"))
        if library in PER_LIBRARY
    },
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "autocast": lambda: None,
    "create_graph": lambda: None,
}


def _switches() -> tuple[Any, ...]:
    """Of float32 products, as a tuple; of autocast; of grad mode."""
    old = () if PER_LIBRARY else (torch.get_float32_matmul_precision(),)
    products = (*old, *(switch.fp32_precision for switch in PER_LIBRARY.values()))
    return products, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()


@computing_with("torch")
def _run(case: str) -> dict[str, Any]:
    """Return gradients, state, and the switches before, within and after a product of the hook."""
    torch.set_num_threads(1)
    ddp = wrap(SHAPES, EVERY_PARAMETER)
    options = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 0}
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
    inside: set[tuple[Any, ...]] = set()
    reconstruct = cpu.reconstruct

    def observed(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        inside.add(_switches())
        reconstruct(p, q, out)

    with _restored(), mock.patch("commhooks.compressors.powersgd.cpu.reconstruct", observed):
        CASES[case]()
        legacy = torch.get_float32_matmul_precision() if case.startswith("precision") else None
        before = _switches()
        got = [
            _backward(ddp, random_gradients(SHAPES, dist.get_rank(), step), case)
            for step in range(STEPS)
        ]
        after = _switches()
        if legacy is not None:
            assert torch.get_float32_matmul_precision() == legacy
    saved = hook.state_dict(residual="per_rank")["parameters"]
    state = {
        name: entry["residual"][0] for name, entry in saved.items() if entry["residual"] is not None
    }
    return {"gradients": got, "state": state, "before": before, "inside": inside, "after": after}


def _backward(ddp: torch.nn.Module, gradients: Gradients, case: str) -> Gradients:
    ddp.zero_grad()
    # Around the whole pass: no operation of this model is one that autocast changes, those of the
    # hook are.
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        ddp(gradients).backward(create_graph=case == "create_graph")
    got = {name: p.grad.detach().clone() for name, p in ddp.module.named_parameters()}
    for p in ddp.parameters():
        p.grad = None  # with create_graph, gradient and parameter hold each other
    return got


def _run_all() -> dict[str, Any]:
    return {case: _run(case) for case in CASES}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_the_users_switches_change_no_bit_and_come_back(run_ranks):
    for results in run_ranks(_run_all):
        expected = results["nothing"]
        for case, got in results.items():
            assert all(map(bits_equal, got["gradients"], expected["gradients"])), case
            assert bits_equal(got["state"], expected["state"]), case
            assert got["before"] == got["after"], case
            assert len(got["inside"]) == 1
            products, autocast, grad_mode = got["inside"].pop()
            assert set(products) <= {"none", "ieee", "highest"}, case
            assert not autocast and not grad_mode, case
        for case in set(CASES) - {"nothing", "autocast", "create_graph"}:
            assert results[case]["before"] != expected["before"], f"{case} switches nothing"


@computing_with("torch")
def _raise_inside() -> list[tuple[Any, ...]]:
    """The switches before and after a pass that ends in an error inside the hook."""
    ddp = wrap(SHAPES)
    commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0})
    with (
        _restored(),
        mock.patch(
            "commhooks.compressors.powersgd.cpu.reconstruct",
            side_effect=ValueError("inside the hook"),
        ),
    ):
        for case in ("mkldnn bf16", "cuda tf32") if PER_LIBRARY else ("precision medium",):
            CASES[case]()
        before = _switches()
        with pytest.raises(ValueError, match="inside the hook"):
            ddp(random_gradients(SHAPES, 0, 0)).backward()
        return [before, _switches()]


def test_the_switches_come_back_after_an_error(run_ranks):
    for before, after in run_ranks(_raise_inside):
        assert before == after


@pytest.mark.parametrize("name", [*PER_LIBRARY, "process"])
def test_threads_that_overlap_leave_the_switches_to_the_last(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Autograd has a thread per GPU, and the switches are those of the process."""
    switch = PER_LIBRARY.get(name, GlobalSwitch())
    inside = threading.Event()
    go_on = threading.Event()
    monkeypatch.setattr(precision, "_PRECISION_SWITCHES", (switch,))

    def other() -> None:
        with precision.full_precision():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other)
    with _restored():
        switch.fp32_precision = "tf32"
        thread.start()
        inside.wait(10)
        with precision.full_precision():
            go_on.set()
            thread.join()
            assert switch.fp32_precision == "ieee"
        assert switch.fp32_precision == "tf32"


def test_the_switch_of_the_process_says_what_torch_says() -> None:
    switch = GlobalSwitch()
    with _restored():
        for torchs, ours in (("highest", "ieee"), ("high", "tf32"), ("medium", "bf16")):
            torch.set_float32_matmul_precision(torchs)
            assert switch.fp32_precision == ours
            switch.fp32_precision = "none"
            assert torch.get_float32_matmul_precision() == "highest"
            switch.fp32_precision = ours
            assert torch.get_float32_matmul_precision() == torchs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_residuals_and_q_are_float32_at_least(run_ranks, dtype):
    assert run_ranks(_dtypes, dtype) == [{torch.promote_types(dtype, torch.float32)}] * 2


def _dtypes(dtype: torch.dtype) -> set[torch.dtype]:
    ddp = wrap(SHAPES, dtype=dtype)
    hook = commhooks.attach(
        ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0}, wrapper="bf16"
    )
    ddp(random_gradients(SHAPES, dist.get_rank(), 0, dtype)).backward()
    entries = hook.state_dict(residual="per_rank")["parameters"].values()
    return {
        tensor.dtype
        for entry in entries
        if entry["q"] is not None
        for tensor in (entry["q"], *entry["residual"])
    }


def _inherited_precision() -> tuple[str, str]:
    torch.backends.fp32_precision = "tf32"
    try:
        Run.new(hook_options={"start_powerSGD_iter": 1}).train(2)
        torch.backends.fp32_precision = "ieee"
        return (
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision,
        )
    finally:
        torch.backends.fp32_precision = "none"


@switches_per_library
def test_an_inherited_precision_stays_inherited(run_ranks: Any) -> None:
    assert run_ranks(_inherited_precision) == [("ieee", "ieee")] * 2


def test_entering_a_hook_dispatches_no_operator() -> None:
    """Every hook call does this; on an accelerator an operator would be a kernel in every call."""
    with Dispatched() as dispatched:
        with plain_mode(), precision.full_precision():
            pass
    assert not dispatched.operators and not dispatched.views
