"""`register_compressor`: which classes and which names it takes. Its other refusals are in
test_author_errors.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import commhooks
from commhooks import HookConfigError, registry
from commhooks.compressors.base import Exchange, State, StepInfo
from commhooks.compressors.cast import Stateless


@pytest.fixture(autouse=True)
def tables_as_they_were() -> Iterator[None]:
    with mock.patch.dict(registry.COMPRESSORS), mock.patch.dict(registry.FACTORIES):
        yield


def _new(name: str, module: str = __name__, short: tuple[str, ...] = ()) -> Any:
    """A compressor class of that name, as if it had been defined at the top of that module."""

    @dataclass(frozen=True, kw_only=True)
    class Config(commhooks.HookConfig):
        """Does nothing."""

        hook_name: ClassVar[str] = name
        aliases: ClassVar[tuple[str, ...]] = short

    class Nothing(Stateless[Any]):
        def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
            return flat
            yield

    Nothing.Config = Config
    Nothing.__module__ = module
    Nothing.__qualname__ = "Nothing"
    return Nothing


def test_a_registered_compressor_is_known_by_its_names() -> None:
    made = _new("my_own", short=("mine",))
    assert commhooks.register_compressor(made) is made
    assert "my_own" in commhooks.available_hooks()
    assert {registry.canonical_name(name) for name in ("my_own", "My-Own", "MINE")} == {"my_own"}
    assert registry.compressor_of(made.Config()) is made
    again = _new("my_own", short=("mine",))
    commhooks.register_compressor(again)  # the same module loaded anew
    assert registry.COMPRESSORS["my_own"] is again
    with pytest.raises(HookConfigError, match="a compressor that is not registered"):
        registry.compressor_of(made.Config())


@pytest.mark.parametrize(
    "name", ["power_sgd", "FP16", "my_own", "mine", "factory", "off", "", "two words", "a:b", 3]
)
def test_a_name_that_is_taken_or_none_is_refused(name: Any) -> None:
    commhooks.register_compressor(_new("my_own", short=("mine",)))
    commhooks.register_hook("factory", lambda options, group: (None, commhooks.allreduce_hook))
    before = dict(registry.COMPRESSORS)
    others = [_new(name, "elsewhere")]
    others += [_new("free", "elsewhere", (name,))] if registry.canonical_name(str(name)) else []
    for other in others:
        with pytest.raises(
            HookConfigError, match="is taken by|expected a word|has no hook_name|means training w"
        ):
            commhooks.register_compressor(other)
    assert before == registry.COMPRESSORS


def test_what_is_no_compressor_is_refused() -> None:
    for wrong in (commhooks.PowerSGD, commhooks.allreduce_hook, "powerSGD"):
        with pytest.raises(HookConfigError, match="expected a subclass of commhooks.Compressor"):
            commhooks.register_compressor(wrong)  # type: ignore[type-var]

    @dataclass(frozen=True, kw_only=True)
    class Needs(commhooks.HookConfig):
        hook_name: ClassVar[str] = "free"
        share: float

    without = _new("free")
    without.Config = Needs
    with pytest.raises(HookConfigError, match="every option needs a default"):
        commhooks.register_compressor(without)
    assert "free" not in registry.COMPRESSORS
