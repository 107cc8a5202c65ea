"""Requests refuse what cannot work with a sentence that says what to do, for all front ends."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from torch import nn

import commhooks
from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.yaml_settings import STOCK_HOOK_FIELDS, TYPES
from commhooks import AttachError, HookConfigError, HookRunError, registry
from commhooks.request import ARGUMENTS, SAVE_RESIDUAL, WRAPPERS, HookRequest
from lightning_commhooks import (
    CommHookCheckpoint,
    CommHookDDP,
    CommHookFSDP2,
    fabric,
    pytorch_lightning,
)
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap


def callable_hook(state: Any, bucket: Any) -> Any:
    raise AssertionError("never called")


def no_arguments() -> Any:
    raise AssertionError("never called")


not_callable = 3


def bad_factory(options: dict[str, Any], process_group: Any) -> Any:
    return callable_hook


def good_factory(options: dict[str, Any], process_group: Any) -> Any:
    return None, callable_hook


@pytest.fixture(autouse=True)
def no_registered_hooks_left() -> Iterator[None]:
    with mock.patch.dict(registry.FACTORIES, clear=True):
        yield


# ---- errors of a request, without a model --------------------------------------------------------

_STEPS = "expected a number of steps, 1 or more, or None"
_RANKS = "expected 'auto', a number of ranks, 1 or more, or None"
SENTENCES: list[tuple[Any, dict[str, Any], str]] = [
    # names of hooks
    (
        "powerSDG",
        {},
        "unknown hook 'powerSDG' (did you mean 'powerSGD'?); known are allreduce, fp16_compress",
    ),
    ("POWERSG", {}, "unknown hook 'POWERSG' (did you mean 'powerSGD'?)"),
    ("itn8", {}, "unknown hook 'itn8' (did you mean 'int8'?)"),
    ("zzz", {}, "unknown hook 'zzz'; known are allreduce, fp16_compress"),
    (
        "mypkg.hooks.hook",
        {},
        "'mypkg.hooks.hook' (for a function of your own write 'mypkg.hooks:hook'); known",
    ),
    ("no_such_module:hook", {}, "hook 'no_such_module:hook': cannot import 'no_such_module'"),
    (
        "test_request:calable_hook",
        {},
        "'test_request' has no 'calable_hook' (did you mean 'callable_hook'?)",
    ),
    ("test_request:not_callable", {}, "is a int, not a callable (state, bucket)"),
    (".rel:x", {}, "hook '.rel:x' is not a path: expected 'package.module:function'"),
    (commhooks.PowerSGD, {}, "hook=PowerSGD is a class; write PowerSGD() with its options inside"),
    (3, {}, "hook=3 is a int; expected a config object such as commhooks.PowerSGD(), a name"),
    # names of options
    (
        "powerSGD",
        {"hook_options": {"rank": 2}},
        (
            "hook 'powerSGD' has no option 'rank' (did you mean 'matrix_approximation_rank'?);"
            " known are matrix_approxim"
        ),
    ),
    (
        "powerSGD",
        {"hook_options": {"start": 2}},
        "no option 'start' (did you mean 'start_powerSGD_iter'?)",
    ),
    (
        "powerSGD",
        {"hook_options": {"matrix_rank": 2}},
        "no option 'matrix_rank' (did you mean 'matrix_approximation",
    ),
    ("powerSGD", {"hook_options": {4: 2}}, "hook 'powerSGD' has no option '4'; known are"),
    ("allreduce", {"hook_options": {"rank": 2}}, "hook 'allreduce' has no options, got 'rank'"),
    ("powerSGD", {"hook_options": [1]}, "hook_options=[1]; expected a dict of options"),
    # shared arguments
    (
        "powerSGD",
        {"wrapper": "fp61"},
        "wrapper='fp61'; expected one of None, 'fp16', 'bf16' (did you mean 'fp16'?)",
    ),
    ("powerSGD", {"wrapper": 16}, "wrapper=16; expected one of None, 'fp16', 'bf16'"),
    (
        "powerSGD",
        {"save_residual": "men"},
        "expected one of 'mean', 'per_rank', 'drop' (did you mean 'mean'?)",
    ),
    ("powerSGD", {"save_residual": None}, "save_residual=None; expected one of"),
    ("powerSGD", {"strict": 1}, "strict=1; expected True or False"),
    ("powerSGD", {"strict": "maybe"}, "strict='maybe'; expected True or False"),
    *(
        ("powerSGD", {"check_every": x}, f"check_every={x!r}; {_STEPS}")
        for x in (0, 1.5, "often", True)
    ),
    *(("powerSGD", {"total_steps": x}, f"total_steps={x!r}; {_STEPS}") for x in (0, 2.0, "many")),
    *(
        ("powerSGD", {"ranks_per_node": x}, f"ranks_per_node={x!r}; {_RANKS}")
        for x in (0, "all", 2.5, "0")
    ),
    (
        "diloco",
        {"hook_options": {"wire": "in8"}},
        "DiLoCo: wire='in8'; expected one of 'float32', 'int8', 'int4' (did",
    ),
    (
        "diloco",
        {"hook_options": {"exclude": [""]}},
        "DiLoCo: exclude=['']; expected patterns that are not empty",
    ),
    (
        "auto",
        {"hook_options": {"quality": "sme"}},
        "Auto: quality='sme'; expected one of 'same', 'close'",
    ),
    ("auto", {"hook_options": {"quality": "sme"}}, "(did you mean 'same'?)"),
    # combinations
    (
        commhooks.PowerSGD(),
        {"hook_options": {"a": 2}},
        "with PowerSGD(...): hook_options is for hooks given by name",
    ),
    (
        callable_hook,
        {"hook_options": {"a": 1}},
        "with the callable callable_hook: hook_options is for hooks given by",
    ),
    (
        "powerSGD",
        {"hook_state": object()},
        "hook_state with hook 'powerSGD', which makes its own state",
    ),
    (
        commhooks.AllReduce(),
        {"hook_state": object()},
        "hook_state with hook 'allreduce', which makes its own state",
    ),
    (
        commhooks.batched_powerSGD_hook,
        {"hook_state": {"rank": 1}},
        "hook_state={'rank': 1}; expected a commhooks.PowerSGDState, or None",
    ),
    (
        "noop",
        {"check_every": 5},
        "check_every with hook 'noop': without communication the replicas drift apart",
    ),
    (
        callable_hook,
        {"ranks_per_node": 2},
        "ranks_per_node with the hook callable_hook, a function: write a compress",
    ),
    (
        "noop",
        {"ranks_per_node": 2},
        "ranks_per_node with hook 'noop', which sends nothing: name a hook such as",
    ),
    (
        "batched_powerSGD",
        {"ranks_per_node": 2},
        "which compresses whole buckets: name a hook such as",
    ),
    (
        "auto",
        {"wrapper": "fp16"},
        "wrapper='fp16' with hook 'auto', which itself chooses what it sends: omit wrapper",
    ),
    ("diloco", {"wrapper": "fp16"}, "omit wrapper and set its option wire"),
]


@pytest.mark.parametrize(("hook", "arguments", "sentence"), SENTENCES)
def test_a_request_that_cannot_work_is_refused_with_a_sentence(
    hook: Any, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HookConfigError) as raised:
        HookRequest.parse(hook, **arguments)
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)


def test_text_of_the_environment_becomes_what_it_says() -> None:
    texts = {"strict": "no", "total_steps": "40", "check_every": "7", "ranks_per_node": "2"}
    request = HookRequest.parse("powerSGD", **texts)
    assert (request.strict, request.total_steps, request.check_every, request.ranks_per_node) == (
        False,
        40,
        7,
        2,
    )
    assert CommHookCheckpoint(strict="no").strict is False  # type: ignore[arg-type]
    options = {"start_powerSGD_iter": "0.5"}
    assert (
        CommHookKwargs(hook="powerSGD", hook_options=options, total_steps="40").request.total_steps
        == 40
    )  # type: ignore[arg-type]


def test_without_a_hook_the_arguments_of_one_are_kept_as_ignored() -> None:
    kept: dict[str, Any] = {"wrapper": "fp16", "check_every": 3, "ranks_per_node": 2}
    request = HookRequest.parse("off", hook_options={"a": 1}, strict=False, **kept)
    assert request.off and request.ignored == ("hook_options", *kept) and not request.strict


NAMES = {
    "powerSGD": ["powersgd", "PowerSGD", "power_sgd", "Power-SGD"],
    "batched_powerSGD": ["batched_power_sgd", "BatchedPowerSGD"],
    "allreduce": ["AllReduce", "all_reduce", "all-reduce"],
    "fp16_compress": ["fp16", "FP16", "FP16Compress", "fp-16"],
    "bf16_compress": ["bf16", "BF16Compress"],
    "int8_compress": ["int8", "Int8Compress", "int-8"],
    "int4_compress": ["int4", "Int4Compress"],
    "diloco": ["DiLoCo", "di-lo-co"],
    "local_sgd": ["LocalSGD", "local-sgd"],
    "noop": ["NoOp", "no_op"],
    "auto": ["Auto", "automatic"],
}


def test_names_ignore_case_underscores_and_dashes() -> None:
    for canonical, others in NAMES.items():
        for spelling in (canonical, *others):
            parsed = HookRequest.parse(spelling)
            assert parsed.name == canonical and type(parsed.config).hook_name == canonical
    assert NAMES.keys() == commhooks.available_hooks().keys()


# ---- errors of `attach` and of registering -------------------------------------------------------


class Gan(nn.Module):
    """A module that is not wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = wrap(mlp())
        self.critic = nn.ModuleDict({"net": wrap(mlp())})


def _attach(
    hook: Any = "powerSGD", model: Callable[[], Any] = lambda: wrap(mlp()), **options: Any
) -> Any:
    return lambda: commhooks.attach(model(), hook, **options)


def _twice() -> None:
    ddp = wrap(mlp())
    commhooks.attach(ddp, "powerSGD")
    commhooks.attach(ddp, "allreduce")


def _bare() -> None:
    ddp = wrap(mlp())
    ddp.register_comm_hook(None, commhooks.powerSGD_hook)
    backward(ddp, 0)


def _registered() -> None:
    commhooks.register_hook("mine", bad_factory)
    commhooks.attach(wrap(mlp()), "mine")


OF_ATTACH: list[tuple[Callable[[], object], str]] = [
    (
        _attach(matrix_approximation_rank=2),
        "attach has no argument 'matrix_approximation_rank'; known are ddp_model, ",
    ),
    (_attach(matrix_approximation_rank=2), "loss_scale; options of the hook go into hook_options"),
    (
        _attach(wraper="bf16"),
        "attach has no argument 'wraper' (did you mean 'wrapper'?); known are ddp",
    ),
    (_attach(save_residual="per_rang"), "'auto' (did you mean 'per_rank'?)"),
    (
        _attach(hook_options={"start_powerSGD_iter": 0.1}),
        "start_powerSGD_iter=0.1 is a fraction of the run, whose le",
    ),
    (
        _attach(loss_scale=65536.0),
        "loss_scale=65536.0; expected a function that returns the factor of this step",
    ),
    (
        _attach(process_group="gloo"),
        "process_group='gloo'; expected a torch.distributed.ProcessGroup",
    ),
    (_attach(no_arguments), "hook 'no_arguments' cannot be called as hook(state, bucket)"),
    (_registered, "expected a pair (state, callable hook)"),
    (lambda: commhooks.register_hook("mine", 3), "the factory is a int, not callable"),  # type: ignore[arg-type]
    (
        lambda: commhooks.register_hook("power-sgd", good_factory),
        "the name 'power-sgd' is taken by 'powerSGD'",
    ),
    (
        lambda: commhooks.register_hook("a:b", good_factory),
        "name='a:b'; expected a word without ':' and spaces",
    ),
    (
        lambda: commhooks.PowerSGD(rank=4),
        "hook 'powerSGD' has no option 'rank' (did you mean 'matrix_approximation_",
    ),  # type: ignore[call-arg]
    (
        _bare,
        (
            "HookRunError: powerSGD_hook and batched_powerSGD_hook need a commhooks.PowerSGDState"
            " as their state, got"
        ),
    ),
    (
        _twice,
        (
            "AttachError: this DistributedDataParallel model has a communication hook already, so"
            " 'allreduce' cannot be attached"
        ),
    ),
    (
        _attach(model=lambda: nn.Linear(2, 2)),
        (
            "AttachError: a communication hook needs a torch.nn.parallel.DistributedDataParallel"
            " model, or one sharded by fully_shard, got a torch.nn.modules.linear.Linear; wrap the"
            " model first"
        ),
    ),
    (
        _attach(model=Gan),
        (
            "Gan is not a DistributedDataParallel model, but contains some: generator, critic.net."
            " Attach a hook to each of them, such as attach(model.generator, ...)"
        ),
    ),
    (_attach(model=lambda: "powerSGD"), "got a builtins.str; the model comes first, then the hook"),
]


@pytest.mark.parametrize(
    ("attempt", "sentence"), OF_ATTACH, ids=[text[:40] for _, text in OF_ATTACH]
)
def test_attach_refuses_wrong_arguments(attempt: Callable[[], object], sentence: str) -> None:
    with process_group_of_one(), pytest.raises(commhooks.CommHookError) as raised:
        attempt()
    assert sentence in f"{type(raised.value).__name__}: {raised.value}"
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)


def test_the_callables_of_the_tables_are_fine_without_their_fault() -> None:
    with process_group_of_one():
        for hook in (callable_hook, "test_request:callable_hook"):
            commhooks.attach(wrap(mlp()), hook)
        commhooks.register_hook("mine", good_factory)
        commhooks.attach(wrap(mlp()), "mine")
        commhooks.attach(
            wrap(mlp()), "powerSGD", hook_options={"start_powerSGD_iter": 0.1}, total_steps="100"
        )  # type: ignore[arg-type]


def test_all_errors_are_of_one_family() -> None:
    for error in (HookConfigError, AttachError, HookRunError, commhooks.PayloadError):
        assert issubclass(error, commhooks.CommHookError)
    assert issubclass(HookConfigError, ValueError) and issubclass(AttachError, RuntimeError)


# ---- front ends ----------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
LIGHTNING = {"hook": REQUIRED, "save_residual": None, "strict": None}
# Each front end: the arguments that it lacks, and the defaults of its own.
FRONT_ENDS: dict[str, tuple[Any, set[str], dict[str, Any]]] = {
    "attach": (commhooks.attach, set(), {"hook": REQUIRED, "save_residual": "auto"}),
    "CommHookDDP": (CommHookDDP, {"total_steps", "shards"}, LIGHTNING),
    "CommHookDDP, pytorch_lightning": (
        pytorch_lightning.CommHookDDP,
        {"total_steps", "shards"},
        LIGHTNING,
    ),
    "CommHookFSDP2": (
        CommHookFSDP2,
        {"hook_state", "total_steps", "ranks_per_node"},
        {"save_residual": None},
    ),
    "Fabric": (fabric.CommHookDDP, {"shards"}, {"hook": REQUIRED, "save_residual": "mean"}),
    "CommHookKwargs": (CommHookKwargs, set(), {}),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_have_the_same_arguments_and_defaults(name: str) -> None:
    front_end, lacks, extra = FRONT_ENDS[name]
    if dataclasses.is_dataclass(front_end):
        defaults = {field.name: field.default for field in dataclasses.fields(front_end)}
    else:
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(front_end).parameters.items()
        }
    expected = {
        name: field.default for name, field in ARGUMENTS.items() if name not in lacks
    } | extra
    assert {name: default for name, default in defaults.items() if name in ARGUMENTS} == expected


def test_yaml_has_the_same_arguments_and_those_of_ddp() -> None:
    of_accelerate = {field.name for field in dataclasses.fields(CommHookKwargs)} - set(
        STOCK_HOOK_FIELDS
    )
    assert TYPES.keys() == of_accelerate and ARGUMENTS.keys() < of_accelerate


def test_what_lightning_cli_offers_are_all_values() -> None:
    def offered(taker: Any, name: str) -> Any:
        return typing.get_args(typing.get_args(typing.get_type_hints(taker.__init__)[name])[0])

    assert offered(CommHookDDP, "wrapper") == offered(CommHookFSDP2, "wrapper") == WRAPPERS
    assert (
        offered(CommHookDDP, "save_residual")
        == offered(CommHookCheckpoint, "save_residual")
        == SAVE_RESIDUAL
    )
