"""Hydra passes OmegaConf's containers to what it makes: they are taken as the dicts and lists that they stand for."""

import importlib
import pickle
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

import commhooks
from commhooks import HookConfigError, PowerSGD
from commhooks.request import HookRequest

YAML = """
rank: 4
strategy:
  _target_: lightning_commhooks.CommHookDDP
  hook: powerSGD
  hook_options:
    matrix_approximation_rank: ${rank}
    exclude: ["*embed*", head.weight]
  bucket_cap_mb: 5
by_config:
  _target_: lightning_commhooks.CommHookDDP
  hook:
    _target_: commhooks.PowerSGD
    matrix_approximation_rank: ${rank}
    exclude: ["*embed*", head.weight]
"""
CONFIG = PowerSGD(matrix_approximation_rank=4, exclude=["*embed*", "head.weight"])


def _instantiate(node: Any) -> Any:
    """What `hydra.utils.instantiate` does by default: containers without `_target_` are passed as they are."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return node
    module, _, name = node["_target_"].rpartition(".")
    arguments = {key: _instantiate(node[key]) for key in node if key != "_target_"}
    return getattr(importlib.import_module(module), name)(**arguments)


@pytest.mark.parametrize("key", ["strategy", "by_config"])
def test_hydra_makes_a_strategy(key: str) -> None:
    pytest.importorskip("lightning")
    made = _instantiate(OmegaConf.create(YAML)[key])
    assert made._request.config == CONFIG
    assert type(made._request.config.exclude) is list
    assert pickle.loads(pickle.dumps(made))._request == made._request


def test_a_list_inside_a_dict_is_converted_too() -> None:
    request = HookRequest.parse("powerSGD", hook_options={"exclude": ListConfig(["a", "b"])})
    assert request.config == PowerSGD(exclude=["a", "b"])


def test_a_factory_gets_plain_values() -> None:
    commhooks.register_hook("of_the_user", lambda options, group: (None, print))
    nested = OmegaConf.create({"x": 1, "options": {"sizes": [1, {"b": "${x}"}]}})
    options = HookRequest.parse("of_the_user", hook_options=nested.options).options
    assert options == {"sizes": [1, {"b": 1}]}
    assert type(options["sizes"]) is list and type(options["sizes"][1]) is dict


@pytest.mark.parametrize("text", ["???", "${nowhere}"])
def test_a_value_that_is_not_there_is_an_error_with_its_name(text: str) -> None:
    options = OmegaConf.create({"matrix_approximation_rank": text})
    with pytest.raises(HookConfigError, match="hook_options: matrix_approximation_rank: "):
        HookRequest.parse("powerSGD", hook_options=options)
    with pytest.raises(HookConfigError, match="PowerSGD: exclude: "):
        PowerSGD(exclude=ListConfig([text]))
