"""What the packages use of OmegaConf is in 2.3, which hydra-core needs, and in 2.4.

The whole tests of the configuration were run with 2.3.0, beside hydra-core 1.3.8, and with 2.4.0.
"""

import ast

import omegaconf
from omegaconf import errors

from tests.support.repository import sources

IN_BOTH = {
    "omegaconf.OmegaConf",
    "omegaconf.DictConfig",
    *(f"omegaconf.errors.{name}" for name in ("OmegaConfBaseException",)),
    *(f"OmegaConf.{name}" for name in ("create", "from_dotlist", "is_config", "load", "merge", "to_container")),
}


def _used() -> set[str]:
    found = set()
    for text in sources().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "omegaconf":
                found |= {f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found |= {f"OmegaConf.{node.attr}"} if node.value.id == "OmegaConf" else set()
    return found


def test_nothing_else_is_used() -> None:
    assert _used() == IN_BOTH


def test_it_is_there() -> None:
    for name in IN_BOTH:
        where, _, what = name.rpartition(".")
        assert hasattr(
            {"omegaconf": omegaconf, "omegaconf.errors": errors, "OmegaConf": omegaconf.OmegaConf}[where], what
        )
    assert {"full_key", "key", "msg"} <= vars(errors.OmegaConfBaseException("x")).keys()
