"""`register_compressor`: which classes and which names it takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import commhooks
from commhooks import registry
from commhooks.compressors.base import Exchange, State, StepInfo
from commhooks.compressors.cast import Stateless


@pytest.fixture(autouse=True)
def tables_as_they_were() -> Iterator[None]:
    with mock.patch.dict(registry.COMPRESSORS), mock.patch.dict(registry.FACTORIES):
        yield


def _new(name: str, module: str = __name__, short: tuple[str, ...] = ()) -> Any:
    """A compressor class of that name."""

    @dataclass(frozen=True, kw_only=True)
    class Config(commhooks.HookConfig):
        """Does nothing."""

        hook_name: ClassVar[str] = name
        aliases: ClassVar[tuple[str, ...]] = short

    class Nothing(Stateless[Any]):
        def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
            return flat
            yield

    # As if it had been defined at the top of that module.
    Nothing.Config, Nothing.__module__, Nothing.__qualname__ = Config, module, "Nothing"
    return Nothing


def test_a_registered_one_is_known_by_its_names() -> None:
    made = _new("my_own", short=("mine",))
    assert commhooks.register_compressor(made) is made
    assert "my_own" in commhooks.available_hooks()
    assert {registry.canonical_name(name) for name in ("my_own", "My-Own", "MINE")} == {"my_own"}
    assert registry.compressor_of(made.Config()) is made
    again = _new("my_own", short=("mine",))
    commhooks.register_compressor(again)  # the same module loaded anew
    assert registry.COMPRESSORS["my_own"] is again
    with pytest.raises(commhooks.HookConfigError, match="a compressor that is not registered"):
        registry.compressor_of(made.Config())


@pytest.mark.parametrize("name", ["powerSGD", "power_sgd", "FP16", "fp16_compress", "my_own", "mine", "factory"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    commhooks.register_compressor(_new("my_own", short=("mine",)))
    commhooks.register_hook("factory", lambda options, group: (None, commhooks.allreduce_hook))
    before = dict(registry.COMPRESSORS)
    for other in (_new(name, "elsewhere"), _new("free", "elsewhere", (name,))):
        with pytest.raises(commhooks.HookConfigError, match="is taken by"):
            commhooks.register_compressor(other)
    assert before == registry.COMPRESSORS


@pytest.mark.parametrize("name", ["", "two words", "module:name", None, 3])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(commhooks.HookConfigError, match="expected a word|has no hook_name"):
        commhooks.register_compressor(_new(name))


def test_what_is_no_compressor_is_refused() -> None:
    for wrong in (commhooks.PowerSGD, commhooks.allreduce_hook, "powerSGD", _new("free")(commhooks.AllReduce())):
        with pytest.raises(commhooks.HookConfigError, match="expected a subclass of commhooks.Compressor"):
            commhooks.register_compressor(wrong)
    without = _new("free")

    @dataclass(frozen=True, kw_only=True)
    class Needs(commhooks.HookConfig):
        hook_name: ClassVar[str] = "free"
        share: float

    without.Config = Needs
    with pytest.raises(commhooks.HookConfigError, match="every option needs a default"):
        commhooks.register_compressor(without)
    without.Config = dict
    with pytest.raises(commhooks.HookConfigError, match="its Config is"):
        commhooks.register_compressor(without)
    assert "free" not in registry.COMPRESSORS
