"""The stock `Accelerator` accepts a `CommHookKwargs`, which can be copied, compared and printed."""

import copy
import dataclasses
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType

from accelerate_commhooks import CommHookKwargs
from commhooks import AttachError, BatchedPowerSGD, HookConfigError, PowerSGD, Torchft
from tests.support.accelerators import OPTIONS, forget_handlers
from tests.support.ddp_steps import log_lines


@pytest.fixture
def one_process() -> Iterator[None]:
    """For an Accelerator in the test's own process."""
    forget_handlers()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_stock_accelerator_accepts_the_handler(one_process: None) -> None:
    handler = CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).ddp_handler is handler


@pytest.mark.parametrize("shards", ["true", "false"])
@pytest.mark.parametrize("members", [None, Torchft(lighthouse="http://127.0.0.1:1")])
def test_the_accelerator_is_left_as_it_is(
    one_process: None, monkeypatch: pytest.MonkeyPatch, shards: str, members: Any
) -> None:
    """Only `CommHookKwargs.attach` overrides a method, where the user calls it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", shards)
    handler = CommHookKwargs(hook="diloco", members=members)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    stock = vars(Accelerator(cpu=True)).keys()
    assert handler.__class__ is DistributedDataParallelKwargs and vars(accelerator).keys() == stock
    if members is not None:
        handler.attach(accelerator)
        assert vars(accelerator).keys() - stock == {"prepare"}


@pytest.mark.parametrize(
    ("started", "text"), [("1", "Start the script with"), ("2", "has started 2 processes")]
)
def test_a_single_process_is_warned_of(
    one_process: None, monkeypatch: pytest.MonkeyPatch, started: str, text: str
) -> None:
    """Else two processes on CPUs would each train alone, without a word."""
    monkeypatch.setenv("WORLD_SIZE", started)
    accelerator = Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD")])
    with log_lines("accelerate_commhooks") as lines:
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
        optimizer.step()
        optimizer.step()
    assert (
        len(lines) == 1
        and lines[0].startswith("commhooks: powerSGD: there is one rank")
        and text in lines[0]
    )


def test_members_without_attach_are_an_error(one_process: None) -> None:
    """At every step: else this machine would train without the others."""
    handler = CommHookKwargs(hook="diloco", members=Torchft(lighthouse="http://127.0.0.1:1"))
    off = CommHookKwargs(hook=None)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
    for _ in range(2):
        with pytest.raises(
            AttachError,
            match=r"trains without the others: call handler\.attach\(accelerator\) before",
        ):
            optimizer.step()
    del handler, accelerator.ddp_handler
    gc.collect()
    optimizer.step()
    assert off.off


def test_a_second_handler_of_ddp_arguments_is_refused(one_process: None) -> None:
    for other in (DistributedDataParallelKwargs(), CommHookKwargs(hook="fp16")):
        with pytest.raises(
            ValueError, match="You can only pass one .*DistributedDataParallelKwargs"
        ):
            Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="powerSGD"), other])


def test_accelerate_still_refuses_an_honest_subclass(one_process: None) -> None:
    """The reason for `CommHookKwargs.__class__`: when this fails, that property can go."""

    class Honest(DistributedDataParallelKwargs):
        pass

    with pytest.raises(KeyError, match="Honest"):
        Accelerator(cpu=True, kwargs_handlers=[Honest()])


# ---- an object like others -----------------------------------------------------------------------


HANDLER = CommHookKwargs(
    bucket_cap_mb=50,
    hook="powerSGD",
    hook_options={"matrix_approximation_rank": 2},
    wrapper="bf16",
    total_steps=9,
)


STOCK = CommHookKwargs(comm_hook="power_sgd", comm_wrapper="fp16")


@pytest.mark.parametrize("handler", [HANDLER, STOCK, CommHookKwargs(hook=None)])
@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))]
)
def test_copies_are_equal_and_separate(handler: CommHookKwargs, way: Any) -> None:
    other = way(handler)
    assert type(other) is CommHookKwargs and other is not handler
    assert other == handler and other.off == handler.off and other.given == handler.given
    other.bucket_cap_mb = 7
    assert other != handler


def test_equality_looks_at_the_class_and_all_fields() -> None:
    assert CommHookKwargs(hook="fp16") == CommHookKwargs(hook="fp16")
    assert CommHookKwargs(hook="fp16") != CommHookKwargs(hook="bf16")
    plain = DistributedDataParallelKwargs()
    assert CommHookKwargs(hook="fp16") != plain and plain != CommHookKwargs(hook="fp16")
    with pytest.raises(TypeError, match="unhashable"):  # as Accelerate's own
        hash(HANDLER)


def test_repr_can_be_read_and_evaluated() -> None:
    text = repr(HANDLER)
    assert text.startswith("CommHookKwargs(bucket_cap_mb=50, hook='powerSGD', hook_options=")
    assert eval(text) == HANDLER
    assert repr(CommHookKwargs(hook=None)) == "CommHookKwargs(hook=None)"


def test_to_kwargs_has_ddp_arguments_only() -> None:
    arguments = {
        "bucket_cap_mb": 50,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    }
    assert CommHookKwargs(hook="powerSGD", **arguments).to_kwargs() == arguments
    assert (
        CommHookKwargs(hook="powerSGD", **arguments).to_dict()
        == DistributedDataParallelKwargs(**arguments).to_dict()
    )


# ---- what is asked for ---------------------------------------------------------------------------


@dataclasses.dataclass
class Refused:
    kwargs: dict[str, Any]
    text: str


REFUSED = [
    Refused({}, "needs hook="),
    Refused({"dim": "powerSGD"}, r"write CommHookKwargs\(hook='powerSGD'\)"),
    Refused({"hook": "powerSG"}, "did you mean 'powerSGD'"),
    Refused(
        {"hook": "powerSGD", "bucket_cap": 2},
        "CommHookKwargs has no argument 'bucket_cap' .did you mean 'bucket_cap_mb'.*; known are",
    ),
    Refused({"hook": PowerSGD(start_powerSGD_iter=0.1)}, "fraction of the run.*pass total_steps="),
    Refused(
        {"comm_hook": "power_sgd", "hook": "fp16"},
        "comm_hook together with hook=.*DDP takes only one",
    ),
    Refused({"comm_wrapper": "fp16", "hook": "powerSGD"}, "comm_wrapper together with hook="),
    Refused(
        {"comm_state_option": {"random_seed": 1}, "hook": "powerSGD"},
        "comm_state_option together with hook=",
    ),
    Refused(
        {"comm_hook": "fp16", "wrapper": "bf16"}, "comm_hook together with hook_options or wrapper="
    ),
    Refused(
        {"comm_hook": "powersgd"}, "comm_hook='powersgd'; expected .* .did you mean 'power_sgd'"
    ),
    Refused({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd'"),
    Refused({"comm_wrapper": "fp16"}, "comm_wrapper without comm_hook"),
    Refused(
        {"comm_hook": "fp16", "comm_state_option": {"random_seed": 1}},
        "'fp16_compress' has no options",
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: str(refused.kwargs))
def test_wrong_arguments_are_refused_at_construction(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints the reason in one line, before the tracebacks of all ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(HookConfigError, match=refused.text) as raised:
            CommHookKwargs(**refused.kwargs)
        assert capsys.readouterr().err == (
            f"commhooks: error: {raised.value}\n" if rank == "0" else ""
        )


@pytest.mark.parametrize("kind", [DDPCommunicationHookType, str], ids=["enum", "string"])
def test_only_the_name_of_the_class_changes(kind: Any) -> None:
    def request(name: str, **more: Any) -> Any:
        return CommHookKwargs(comm_hook=kind(name), **more).request

    assert [request(name).name for name in ("fp16", "bf16")] == ["fp16_compress", "bf16_compress"]
    for name, ours, wrapper in (
        ("power_sgd", PowerSGD, "fp16"),
        ("batched_power_sgd", BatchedPowerSGD, "bf16"),
    ):
        parsed = request(name, comm_wrapper=kind(wrapper), comm_state_option=OPTIONS)
        assert (parsed.config, parsed.wrapper) == (ours(**OPTIONS), wrapper)
