"""The areas of `make test-mutants` name tests and lines that exist."""

import pytest

from tests.stress.mutation_areas import AREAS, stale
from tests.support.repository import TESTS


def test_the_explained_lines_are_in_the_code() -> None:
    assert stale() == []


@pytest.mark.parametrize("area", AREAS)
def test_the_tests_of_an_area_exist(area: str) -> None:
    for test in {path for part in AREAS[area] for path in part.tests}:
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (TESTS / f"{file}.py").read_text(), test
