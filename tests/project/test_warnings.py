"""Warnings say where they come from: all of them go through `commhooks.errors.logger_of` or Lightning's `warn`."""

import ast
import logging

import pytest

from commhooks.errors import logger_of
from tests.support.repository import sources

HELPERS = {"commhooks/errors.py", "lightning_commhooks/strategy.py"}


def _warnings_without_prefix(source: str) -> list[int]:
    """Lines that warn through a logger without the prefix, through Lightning or through `warnings`."""
    tree = ast.parse(source)
    prefixed = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.func, ast.Name) and node.value.func.id == "logger_of"
    }
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "rank_zero_warn":
            lines.append(node.lineno)
        elif isinstance(called, ast.Attribute) and called.attr in ("warning", "warn") and node.args:
            as_torch = isinstance(node.args[0], ast.Constant) and str(node.args[0].value).startswith("NOTE: Process")
            if not as_torch and not (isinstance(called.value, ast.Name) and called.value.id in prefixed):
                lines.append(node.lineno)
    return lines


def test_every_warning_has_the_prefix() -> None:
    texts = {file: text for file, text in sources().items() if file not in HELPERS}
    found = {file: lines for file, text in texts.items() if (lines := _warnings_without_prefix(text))}
    assert found == {} and len(texts) > 100


def test_the_prefix_and_the_place(caplog: pytest.LogCaptureFixture) -> None:
    logger = logger_of("commhooks.test")
    with caplog.at_level(logging.INFO):
        logger.warning("%s of %d", "one", 2)
        logger.info("as it is")
    assert [record.getMessage() for record in caplog.records] == ["commhooks: one of 2", "as it is"]
    assert {record.filename for record in caplog.records} == {"test_warnings.py"}
