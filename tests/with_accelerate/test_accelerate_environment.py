"""Settings handed over in the environment: what wins over what, and that they must be used."""

import os
import pickle
from pathlib import Path
from unittest import mock

import pytest

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.settings import VARIABLE
from commhooks import HookConfigError, PowerSGD


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hook.yaml"
    path.write_text("hook: powerSGD\nhook_options: {matrix_approximation_rank: 4}\nwrapper: bf16\nstrict: false\n")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_the_variable_names_a_file(named: Path) -> None:
    expected = CommHookKwargs(
        hook="powerSGD", hook_options={"matrix_approximation_rank": 4}, wrapper="bf16", strict=False
    )
    assert CommHookKwargs() == CommHookKwargs.from_config() == expected
    overridden = CommHookKwargs.from_config(overrides=["hook_options.matrix_approximation_rank=8", "strict=true"])
    assert overridden.hook_options == {"matrix_approximation_rank": 8} and overridden.strict


def test_argument_over_environment_over_default(named: Path) -> None:
    handler = CommHookKwargs(wrapper=None, strict=True, bucket_cap_mb=7)
    assert (handler.wrapper, handler.strict, handler.bucket_cap_mb) == (None, True, 7)  # argument
    assert (handler.hook, handler.hook_options) == ("powerSGD", {"matrix_approximation_rank": 4})  # environment
    assert handler.save_residual == "per_rank"  # default
    # A hook given as an argument leaves nothing of the environment, which describes another hook.
    for kwargs in ({"hook": "allreduce"}, {"hook": PowerSGD()}, {"comm_hook": "fp16"}):
        handler = CommHookKwargs(**kwargs)
        assert (handler.wrapper, handler.strict, handler.hook_options) == (None, True, None)
    other = named.with_name("other.yaml")
    other.write_text("hook: allreduce\n")
    assert CommHookKwargs.from_config(other) == CommHookKwargs(hook="allreduce")


def test_copies_do_not_ask_the_environment_again(named: Path) -> None:
    handler = CommHookKwargs(strict=True)
    with mock.patch.dict(os.environ, {VARIABLE: "/nothing.yaml"}):
        other = pickle.loads(pickle.dumps(handler))
        assert other == handler and other.given == handler.given


def test_wrong_content_of_the_variable(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("/no/such/file.yaml", "{", "{}", '{"settings": 3, "source": "x"}'):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(HookConfigError, match=VARIABLE):
            CommHookKwargs()
    named.write_text("hook: powerSDG")
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(HookConfigError, match="hook.yaml: unknown hook 'powerSDG'"):
        CommHookKwargs()


def test_an_error_names_the_file_only_for_what_it_holds(named: Path) -> None:
    for kwargs, says in (
        ({"wrapper": "fp61"}, "wrapper='fp61'"),
        ({"hook_options": {"matrix_approximation_rank": 0}}, "PowerSGD: matrix_approximation_rank=0; "),
        ({"total_steps": -1}, "total_steps=-1; "),
    ):
        with pytest.raises(HookConfigError, match=f"^{says}"):
            CommHookKwargs(**kwargs)
    named.write_text("hook: powerSGD\nhook_options: {matrix_approximation_rank: 0}\n")
    with pytest.raises(HookConfigError, match="hook.yaml: PowerSGD: matrix_approximation_rank=0; "):
        CommHookKwargs(wrapper="bf16")


def test_nothing_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "  "):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(HookConfigError, match=f"needs hook=.*{VARIABLE}"):
            CommHookKwargs()
        with pytest.raises(HookConfigError, match=f"nothing was handed over.*{VARIABLE}"):
            CommHookKwargs.from_config()
