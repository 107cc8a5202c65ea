"""Requests that cannot work: the class of the error and its text, in which the user finds what to do."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf
from torch import nn

import commhooks
from commhooks import AttachError, HookConfigError, HookRunError, registry, request
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


class Gan(nn.Module):
    """A module that is not wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = wrap(mlp()), nn.ModuleDict({"net": wrap(mlp())})


@dataclass
class Expected:
    """One request and the error that it ends in. `error` must be its class exactly; `text` must be part of it."""

    name: str
    text: str
    hook: Any = "powerSGD"
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `attach`."""
    error: type[Exception] = HookConfigError
    model: Callable[[], Any] = lambda: wrap(mlp())
    request: Callable[[], object] | None = None
    """In place of `attach(model(), hook, **options)`."""


def _options(**hook_options: Any) -> dict[str, Any]:
    return {"hook_options": hook_options}


def _twice() -> None:
    ddp = wrap(mlp())
    commhooks.attach(ddp, "powerSGD")
    commhooks.attach(ddp, "allreduce")


def _bare(state: Any) -> None:
    ddp = wrap(mlp())
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    backward(ddp, 0)


def _registered(factory: Any) -> Any:
    def request() -> None:
        commhooks.register_hook("mine", factory)
        commhooks.attach(wrap(mlp()), "mine")

    return request


CASES = [
    # names
    Expected("wrong hook", "unknown hook 'powerSDG' (did you mean 'powerSGD'?); known are allreduce", "powerSDG"),
    Expected("wrong hook, other case", "unknown hook 'POWERSG' (did you mean 'powerSGD'?)", "POWERSG"),
    Expected("wrong hook, nothing near", "unknown hook 'zzz'; known are allreduce, fp16_compress", "zzz"),
    Expected(
        "wrong option",
        "hook 'powerSGD' has no option 'matrix_aproximation_rank' (did you mean 'matrix_approximation_rank'?); known "
        "are matrix_approximation_rank, start_powerSGD_iter",
        options=_options(matrix_aproximation_rank=2),
    ),
    Expected(
        "part of an option's name",
        "hook 'powerSGD' has no option 'rank' (did you mean 'matrix_approximation_rank'?)",
        "powerSGD",
        _options(rank=2),
    ),
    Expected("start of an option's name", "hook 'powerSGD' has no option 'start' (did you mean 'start_powerSGD_iter'?)",
             options=_options(start=2)),
    Expected("short name", "unknown hook 'itn8' (did you mean 'int8'?)", "itn8"),
    Expected("option of none", "hook 'allreduce' has no options, got 'rank'", "allreduce", _options(rank=2)),
    Expected("wrapper typo", "wrapper='fp61'; expected one of None, 'fp16', 'bf16' (did you mean 'fp16'?)",
             options={"wrapper": "fp61"}),
    Expected("wrapper of wrong type", "wrapper=16; expected one of None, 'fp16', 'bf16'", options={"wrapper": 16}),
    Expected("save_residual typo", "'auto' (did you mean 'per_rank'?)", options={"save_residual": "per_rang"}),
    Expected("save_residual None", "save_residual=None; expected one of", options={"save_residual": None}),
    Expected("strict of wrong type", "strict='maybe'; expected True or False", options={"strict": "maybe"}),
    # values
    Expected("rank 0", "PowerSGD: matrix_approximation_rank=0; expected at least 1",
             options=_options(matrix_approximation_rank=0)),
    Expected("rank of wrong type", "PowerSGD: matrix_approximation_rank='two'; expected int",
             options=_options(matrix_approximation_rank="two")),
    Expected("negative start", "start_powerSGD_iter=-1; expected a number of steps, 0 or more",
             options=_options(start_powerSGD_iter=-1)),
    Expected("start 1.0", "start_powerSGD_iter=1.0; expected a fraction of the run strictly between 0 and 1",
             options=_options(start_powerSGD_iter=1.0)),
    Expected("start 0.0", "start_powerSGD_iter=0.0; expected a fraction", options=_options(start_powerSGD_iter=0.0)),
    Expected("start -0.5", "start_powerSGD_iter=-0.5; expected a fraction", options=_options(start_powerSGD_iter=-0.5)),
    Expected("fraction, length unknown", "start_powerSGD_iter=0.1 is a fraction of the run, whose length is unknown",
             options=_options(start_powerSGD_iter=0.1)),
    Expected("min rate", "min_compression_rate=0.0; expected a positive number",
             options=_options(min_compression_rate=0)),
    Expected("epsilon", "orthogonalization_epsilon=-1.0; expected 0 or a small",
             options=_options(orthogonalization_epsilon=-1)),
    Expected("total_steps", "total_steps=0; expected a number of steps", options={"total_steps": 0}),
    Expected("total_steps of wrong type", "total_steps='many'; expected a number", options={"total_steps": "many"}),
    Expected("options of wrong type", "hook_options=[1]; expected a dict of options", options={"hook_options": [1]}),
    Expected("loss scale", "loss_scale=65536.0; expected a function that returns the factor of this step",
             options={"loss_scale": 65536.0}),
    Expected("process group", "process_group='gloo'; expected a torch.distributed.ProcessGroup",
             options={"process_group": "gloo"}),
    # combinations
    Expected("options beside a config", "with PowerSGD(...): hook_options is for hooks given by name",
             commhooks.PowerSGD(), _options(matrix_approximation_rank=2)),
    Expected("options beside a callable", "with the callable callable_hook: hook_options is for hooks given by name",
             callable_hook, _options(a=1)),
    Expected("state with a built-in", "hook_state with hook 'powerSGD', which makes its own state",
             options={"hook_state": object()}),
    Expected("state with a config", "hook_state with hook 'allreduce', which makes its own state",
             commhooks.AllReduce(), {"hook_state": object()}),
    Expected("class for instance", "hook=PowerSGD is a class; write PowerSGD() with its options inside",
             commhooks.PowerSGD),
    Expected("something else", "hook=3 is a int; expected a config object such as commhooks.PowerSGD(), a name", 3),
    Expected("state of a wrong type", "hook_state={'rank': 1}; expected a commhooks.PowerSGDState, or None",
             commhooks.batched_powerSGD_hook, {"hook_state": {"rank": 1}}),
    Expected("PowerSGDState missing", "need a commhooks.PowerSGDState as their state, got a builtins.NoneType",
             error=HookRunError, request=lambda: _bare(None)),
    Expected("wrong signature", "hook 'no_arguments' cannot be called as hook(state, bucket)", no_arguments),
    # options beside the hook
    Expected("an option beside the hook", "attach has no argument 'matrix_approximation_rank'; known are ddp_model, ",
             options={"matrix_approximation_rank": 2}),
    Expected("an argument, misspelt", "attach has no argument 'wraper' (did you mean 'wrapper'?); known are ddp",
             options={"wraper": "bf16"}),
    Expected("an argument of nobody", "attach has no argument 'zzz'; known are ddp_model, hook",
             "allreduce", {"zzz": 1}),
    Expected("a config's option", "hook 'powerSGD' has no option 'rank' (did you mean 'matrix_approximation_rank'?); "
             "known are matrix_approximation_rank, start_powerSGD_iter", request=lambda: commhooks.PowerSGD(rank=4)),
    # dotted paths
    Expected("no such module", "hook 'no_such_module:hook': cannot import 'no_such_module'", "no_such_module:hook"),
    Expected(
        "no such function",
        "hook 'test_config_errors:calable_hook': 'test_config_errors' has no 'calable_hook' (did you mean "
        "'callable_hook'?)",
        "test_config_errors:calable_hook",
    ),
    Expected("not callable", "is a int, not a callable (state, bucket)", "test_config_errors:not_callable"),
    Expected("relative path", "hook '.rel:x' is not a path: expected 'package.module:function'", ".rel:x"),
    Expected("path without a function", "hook 'torch:' is not a path: expected 'package.module:function'", "torch:"),
    Expected("path without a colon", "'mypkg.hooks.hook' (for a function of your own write 'mypkg.hooks:hook'); known",
             "mypkg.hooks.hook"),
    # register_hook
    Expected("built-in name", "the name 'power-sgd' is taken by 'powerSGD'",
             request=lambda: commhooks.register_hook("power-sgd", good_factory)),
    Expected("name with a colon", "name='a:b'; expected a word without ':' and spaces",
             request=lambda: commhooks.register_hook("a:b", good_factory)),
    Expected("factory", "the factory is a int, not callable", request=lambda: commhooks.register_hook("mine", 3)),
    Expected("factory without a pair", "expected a pair (state, callable hook)", request=_registered(bad_factory)),
    # models
    Expected("not DDP", "needs a torch.nn.parallel.DistributedDataParallel model, or one sharded by fully_shard, got a "
             "torch.nn.modules.linear.Linear; wrap the model first",
             error=AttachError, model=lambda: nn.Linear(2, 2)),
    Expected("a module of DDP models", "Gan is no DistributedDataParallel model, but holds some: generator, "
             "critic.net. Attach a hook to each of them, such as attach(model.generator, ...)",
             error=AttachError, model=Gan),
    Expected(
        "swapped",
        "got a builtins.str; the model comes first, then the hook",
        error=AttachError,
        model=lambda: "powerSGD",
    ),
    Expected("second registration", "has a communication hook already, so 'allreduce' cannot be", error=AttachError,
             request=_twice),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_registered_hooks_left() -> Iterator[None]:
    with mock.patch.dict(registry.FACTORIES, clear=True):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_error(case: Expected):
    with process_group_of_one(), pytest.raises(commhooks.CommHookError) as caught:
        if case.request is not None:
            case.request()
        else:
            commhooks.attach(case.model(), case.hook, **case.options)
    assert type(caught.value) is case.error
    assert case.text in str(caught.value)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_the_callables_of_the_table_are_fine_without_their_fault():
    with process_group_of_one():
        for hook in (callable_hook, "test_config_errors:callable_hook"):
            commhooks.attach(wrap(mlp()), hook)
        commhooks.register_hook("mine", good_factory)
        commhooks.attach(wrap(mlp()), "mine")
        commhooks.attach(wrap(mlp()), "powerSGD", hook_options={"start_powerSGD_iter": 0.1}, total_steps=100)


# --------------------------------------------------------------------------------------------------------------- names

NAMES = {
    "powerSGD": ["powerSGD", "powersgd", "PowerSGD", "power_sgd", "Power-SGD", "POWER_SGD"],
    "batched_powerSGD": ["batched_powerSGD", "batched_power_sgd", "BatchedPowerSGD", "batched-powersgd"],
    "allreduce": ["allreduce", "AllReduce", "all_reduce", "all-reduce"],
    "fp16_compress": ["fp16_compress", "fp16", "FP16", "FP16Compress", "fp-16"],
    "bf16_compress": ["bf16_compress", "bf16", "BF16", "BF16Compress"],
    "int8_compress": ["int8_compress", "int8", "INT8", "Int8Compress", "int-8"],
    "int4_compress": ["int4_compress", "int4", "Int4Compress"],
    "diloco": ["diloco", "DiLoCo", "di-lo-co"],
    "local_sgd": ["local_sgd", "LocalSGD", "local-sgd"],
    "noop": ["noop", "NoOp", "no_op"],
    "auto": ["auto", "Auto", "AUTO", "automatic"],
}


@pytest.mark.parametrize("canonical", NAMES)
def test_names_ignore_case_underscores_and_dashes(canonical):
    for given in NAMES[canonical]:
        parsed = request.HookRequest.parse(given)
        assert parsed.name == canonical and type(parsed.config).hook_name == canonical
    assert NAMES.keys() == commhooks.available_hooks().keys()


# ------------------------------------------------------------------------------------------------- config classes, YAML

CONFIGS = [
    commhooks.AllReduce,
    commhooks.FP16Compress,
    commhooks.BF16Compress,
    commhooks.Noop,
    commhooks.PowerSGD,
    commhooks.BatchedPowerSGD,
]
OTHER_VALUES = {
    "matrix_approximation_rank": 4,
    "start_powerSGD_iter": 0.25,
    "min_compression_rate": 1.5,
    "use_error_feedback": False,
    "warm_start": False,
    "orthogonalization_epsilon": 1e-8,
    "random_seed": 7,
    "compression_stats_logging_frequency": 10,
    "batch_tensors_with_same_shape": True,
    "exclude": ["*embed*", "head.?.weight"],
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_config_is_an_omegaconf_structured_config(config):
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config()
    values = OTHER_VALUES if dataclasses.fields(config) else {}
    if config is commhooks.BatchedPowerSGD:
        values = values | {"exclude": []}
    given = config(**values)
    through_yaml = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(given)))
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), through_yaml)) == given
    assert request.HookRequest.parse(config.hook_name, hook_options=values).config == given
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.anything = 1
    if values:
        assert values.keys() == {field.name for field in dataclasses.fields(config)}
        with pytest.raises(TypeError):
            config(4)  # keyword-only


def test_the_defaults_are_those_of_torch_but_for_the_start():
    theirs = inspect.signature(commhooks.PowerSGDState).parameters
    for config in (commhooks.PowerSGD, commhooks.BatchedPowerSGD):
        for field_ in dataclasses.fields(config):
            if field_.name == "exclude":  # needs names, of which a PowerSGDState has none
                continue
            expected = None if field_.name == "start_powerSGD_iter" else theirs[field_.name].default
            assert field_.default == expected, field_.name


WRONG_VALUES = [
    ("matrix_approximation_rank", 0),
    ("matrix_approximation_rank", 1.5),
    ("matrix_approximation_rank", None),
    ("matrix_approximation_rank", True),
    ("exclude", "*embed*"),
    ("exclude", [""]),
    ("exclude", {"*embed*": True}),
    ("start_powerSGD_iter", -1),
    ("start_powerSGD_iter", 1.0),
    ("start_powerSGD_iter", float("nan")),
    ("start_powerSGD_iter", "soon"),
    ("start_powerSGD_iter", True),
    ("min_compression_rate", -1),
    ("min_compression_rate", float("inf")),
    ("min_compression_rate", "much"),
    ("min_compression_rate", False),
    ("use_error_feedback", "maybe"),
    ("use_error_feedback", 2.5),
    ("warm_start", None),
    ("orthogonalization_epsilon", -1e-8),
    ("random_seed", "x"),
    ("compression_stats_logging_frequency", 1.5),
]


@pytest.mark.parametrize("name, value", WRONG_VALUES, ids=lambda x: str(x))
def test_python_and_yaml_refuse_the_same_values(name, value):
    for config in (commhooks.PowerSGD, commhooks.BatchedPowerSGD):
        with pytest.raises(HookConfigError, match=name):
            config(**{name: value})
        with pytest.raises(HookConfigError, match=name):
            request.HookRequest.parse(config.hook_name, hook_options={name: value})
    if name != "exclude":  # a bare register_comm_hook has no names
        with pytest.raises(HookConfigError, match=name):
            commhooks.PowerSGDState(None, **{name: value})


def test_all_errors_are_of_one_family():
    for error in (HookConfigError, AttachError, HookRunError, commhooks.PayloadError):
        assert issubclass(error, commhooks.CommHookError)
    assert issubclass(HookConfigError, ValueError) and issubclass(AttachError, RuntimeError)
