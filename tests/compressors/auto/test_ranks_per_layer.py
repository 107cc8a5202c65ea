"""Ranks per layer: from shares of energy, for a target share or a number of bytes."""

import dataclasses
import glob
import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from commhooks.compressors.adaptive import ObservedPass
from commhooks.compressors.auto.candidates import counted_bytes, look_at, new, powersgd_candidates, simple
from commhooks.compressors.auto.energy import Energies, by_layer
from commhooks.compressors.auto.options import Auto
from commhooks.compressors.auto.ranks import LARGEST, ranks_for_bytes, ranks_for_share, truncated
from commhooks.compressors.candidates import powersgd
from commhooks.gradients.layout import read_layout
from commhooks.gradients.names import ModelNames

KEPT = {"steep": [0.9, 0.95, 0.97], "flat": [0.2, 0.4, 0.6], "thin": [0.5]}


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.1, {"steep": 1, "flat": 1, "thin": 1}),
        (0.4, {"steep": 1, "flat": 2, "thin": 1}),
        (0.6, {"steep": 1, "flat": 3, "thin": 1}),
        (0.96, {"steep": 3, "flat": 3, "thin": 1}),
        (math.nan, {"steep": 3, "flat": 3, "thin": 1}),
    ],
)
def test_ranks_for_a_share(share: float, expected: dict[str, int]) -> None:
    assert ranks_for_share(KEPT, share) == expected


def _bytes(ranks: Mapping[str, int]) -> float:
    return 100 * sum(ranks.values())


def test_ranks_for_bytes_are_the_best_of_all() -> None:
    """Against all combinations: no other ranks within the limit let the layer that keeps least keep more."""

    def least(ranks: Mapping[str, int]) -> float:
        # A layer that keeps all that it can at its highest rank does not hold the others back.
        return min((KEPT[name][rank - 1] for name, rank in ranks.items() if rank < len(KEPT[name])), default=math.inf)

    for limit in range(0, 900, 100):
        found = ranks_for_bytes(KEPT, limit, _bytes)
        every = [
            dict(zip(KEPT, each, strict=True))
            for each in itertools.product(*(range(1, len(shares) + 1) for shares in KEPT.values()))
        ]
        allowed = [each for each in every if _bytes(each) <= limit]
        if not allowed:
            assert found == {"steep": 1, "flat": 1, "thin": 1}
            continue
        assert _bytes(found) <= limit
        assert least(found) >= max(map(least, allowed)) - 0.31  # shares come in steps


def test_ranks_that_save_too_little_are_not_considered() -> None:
    shares = [rank / LARGEST for rank in range(1, LARGEST + 1)]
    assert len(truncated(shares, 24, 24)) == 5  # (24 + 24) * 5 * 2 < 576
    assert truncated(shares, 4, 4) == shares[:1]
    assert truncated([0.0] * LARGEST, 100, 50) == [rank / 50 for rank in range(1, 17)]
    assert truncated([math.nan] * LARGEST, 100, 50) == [rank / 50 for rank in range(1, 17)]


def _seen(gradients: Mapping[str, torch.Tensor]) -> ObservedPass:
    """A pass with one bucket."""
    flat = torch.cat([each.flatten() for each in gradients.values()])
    parameters = [nn.Parameter(torch.zeros_like(each)) for each in gradients.values()]
    layout = read_layout(flat, parameters, list(gradients))
    return ObservedPass(1.0, [layout], ModelNames(zip(gradients, parameters, strict=True)), [flat])


def test_energies_are_those_of_the_singular_values() -> None:
    """Against torch.linalg.svdvals, on two matrices in one bucket, whatever their size; a vector between them."""
    torch.manual_seed(0)
    gradients = {name: torch.randn(shape) for name, shape in {"a": (40, 60), "bias": (40,), "b": (70, 50)}.items()}
    factor = torch.linspace(1, 0.01, 40)[:, None] ** 2
    gradients["a"] = 1e-30 * torch.linalg.qr(torch.randn(40, 40))[0] @ (factor * gradients["a"])
    seen, energies = _seen(gradients), Energies()
    untouched = seen.gradients[0].clone()
    for _ in range(2):
        look_at(seen, Auto(quality="close", target=1), energies)
    assert torch.equal(seen.gradients[0], untouched)
    names = ["a", "b", "missing"]
    kept = by_layer(energies.numbers(names), names)
    for name in ("a", "b"):
        squares = torch.linalg.svdvals(gradients[name].double()).square()
        true = (squares.cumsum(0) / squares.sum())[:LARGEST]
        assert torch.allclose(torch.tensor(kept[name], dtype=torch.float64), true, atol=0.04), name
        assert kept[name] == sorted(kept[name])
    assert kept["missing"] == [0.0] * LARGEST


@pytest.mark.parametrize("number", [0.0, math.inf, math.nan])
def test_gradients_of_zeros_or_not_finite_are_not_measured(number: float) -> None:
    energies = Energies()
    energies.look({"bad": torch.full((64, 64), number), "other": torch.ones(64, 64)})
    shares = by_layer(energies.numbers(["bad", "other"]), ["bad", "other"])
    assert shares["bad"] == [0.0] * LARGEST and shares["other"] == pytest.approx([1.0] * LARGEST)


@pytest.mark.parametrize("limit", [1000, 5000, 9000, 20_000, 10**6])
def test_ranks_for_bytes_count_what_is_planned(limit: int) -> None:
    """Vectors and layers without a useful rank are part of it. Bytes are added up; plans are made here."""
    torch.manual_seed(0)
    shapes = {"a": (40, 60), "bias": (40,), "b.[0]": (70, 50), "small": (3, 3)}
    seen = _seen({name: torch.randn(shape) for name, shape in shapes.items()})
    config, energies = Auto(quality="close", target=limit), Energies()
    look_at(seen, config, energies)
    (found,) = powersgd_candidates(config, seen, energies, Alone())  # type: ignore[arg-type]
    chosen = {name.replace("[[]", "["): rank for name, rank in found.options["matrix_approximation_rank"].items()}
    layers = {"a": (40, 60), "b.[0]": (70, 50)}
    kept = by_layer(energies.numbers([*layers]), [*layers])

    def planned(ranks: Mapping[str, int]) -> float:
        return counted_bytes(new(powersgd({glob.escape(name): rank for name, rank in ranks.items()}, {})), seen)

    assert chosen == ranks_for_bytes({name: truncated(kept[name], *layers[name]) for name in layers}, limit, planned)
    assert planned(chosen) <= limit or set(chosen.values()) == {1}


def test_without_a_target_a_layer_has_rank_16_or_the_highest_that_halves_it() -> None:
    shapes = {"a": (40, 60), "bias": (40,), "b": (200, 100), "small": (3, 3)}
    seen = _seen({name: torch.randn(shape) for name, shape in shapes.items()})
    (found,) = powersgd_candidates(Auto(quality="close"), seen, Energies(), Alone())  # type: ignore[arg-type]
    assert found.label == "powerSGD (ranks 11 to 16)"
    assert found.options["matrix_approximation_rank"] == {"a": 11, "b": 16}  # (40 + 60) * 11 * 2 < 2400


def test_sparse_gradients_count_as_nothing() -> None:
    seen = _seen({"a": torch.randn(40, 60), "bias": torch.randn(40)})
    plain = new(simple(Auto())[0])
    assert counted_bytes(plain, seen) == 4 * (40 * 60 + 40)
    sparse = dataclasses.replace(seen.layouts[0], sparse=True)
    assert counted_bytes(plain, dataclasses.replace(seen, layouts=[sparse])) == 0


class Alone:
    """`Ranks` of one."""

    def of_first(self, numbers: list[float]) -> list[float]:
        return numbers
