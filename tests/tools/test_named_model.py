"""A model by its name: a function that builds it, or a checkpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commhooks import HookConfigError
from commhooks.tools.named_model import from_checkpoint, named_model
from tests.support.ddp_steps import mlp
from tests.support.plan_models import Net


def test_from_functions() -> None:
    for function in ("build_mlp", "build_for_the_doctor"):
        found = named_model(f"tests.support.plan_models:{function}")
        assert list(found.parameters) == [name for name, _ in mlp().named_parameters()]
    assert "2 frozen parameters" in named_model("tests.support.plan_models:Net").note
    for target, text in {
        "plan_models": "is neither a file nor 'package.module:function'",
        "tests.support.plan_models:": "expected 'package.module:function' with the full name",
        "no_such_module:build": "cannot import 'no_such_module': No module named 'no_such_module'; start where",
        "tests.support.plan_models:build": "'tests.support.plan_models' has no 'build' .did you mean 'build_mlp'",
        "tests.support.plan_models:not_callable": "is a int, not a function that returns an nn.Module",
        "tests.support.plan_models:needs_an_argument": "cannot be called without arguments",
        "tests.support.plan_models:no_model": "returned a int, not an nn.Module",
        "train.py": "write 'train.py:build', where build is the function in it that takes no arguments",
        "no_such_folder/train.py:build": "there is no file .*/no_such_folder/train.py",
        "torch.nn:Identity": "has no parameter that requires a gradient",
    }.items():
        with pytest.raises(HookConfigError, match=text):
            named_model(target)


def test_from_the_current_folder(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_model_of_this_test.py").write_text("from torch import nn\nbuild = lambda: nn.Linear(3, 3)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        assert len(named_model("my_model_of_this_test:build").parameters) == 2
    finally:
        sys.modules.pop("my_model_of_this_test", None)
    assert sys.path == before


def test_from_a_python_file(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "helper_of_this_test.py").write_text("from torch import nn\n")
    file = tmp_path / "train_of_this_test.py"
    file.write_text(
        "from helper_of_this_test import nn\nclass Nets:\n    build = staticmethod(lambda: nn.Linear(3, 3))\n"
    )
    (tmp_path / "broken_of_this_test.py").write_text("import no_such_module\n")
    (tmp_path / "json.py").write_text("")
    monkeypatch.chdir(tmp_path.parent)
    before = list(sys.path)
    try:
        for target in (f"{file}:Nets.build", f"{tmp_path.name}/train_of_this_test.py:Nets.build"):
            assert len(named_model(target).parameters) == 2
        for target, text in {
            f"{file}:Nets.biuld": "'train_of_this_test.Nets' has no 'biuld' .did you mean 'build'",
            f"{tmp_path}/broken_of_this_test.py:build": "cannot import .*broken_of_this_test.py: No module named",
            f"{tmp_path}/json.py:build": "a module 'json' of another file is imported already; rename json.py",
        }.items():
            with pytest.raises(HookConfigError, match=text):
                named_model(target)
    finally:
        for name in ("train_of_this_test", "helper_of_this_test"):
            sys.modules.pop(name, None)
    assert sys.path == before


@pytest.mark.parametrize("zipped", [True, False])
def test_from_checkpoints(tmp_path: Path, zipped: bool) -> None:
    path, net = tmp_path / "some.ckpt", Net()
    state = net.state_dict()
    for content in (
        state,
        {"epoch": 3, "state_dict": state, "optimizer_states": [{}]},
        {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
        {"model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}},
    ):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        found = from_checkpoint(path)
        assert {name: p.shape for name, p in found.parameters.items()} == {
            name: p.shape for name, p in net.named_parameters()
        }
        assert found.all_names[id(found.parameters["embed.weight"])] == ["embed.weight", "head.weight"]  # tied
        assert "does not tell buffers" in found.note
    torch.save({"epoch": 3, "weights": [1]}, path)
    with pytest.raises(HookConfigError, match="holds no state dict of a model: .* it has 'epoch', 'weights'"):
        named_model(str(path))
    with pytest.raises(HookConfigError, match="is a folder"):
        named_model(str(tmp_path))
