"""No source can run what a file holds, every warning has its prefix, and numpy is not used."""

import ast
import logging

import pytest

from commhooks.errors import logger_of
from tests.support.repository import nodes

# ---- code from files; `test_hostile_files.py` plants some in files -------------------------------

# What imports by name: what a user's configuration or command line names; the subcommands, the
# built-in hooks and the packages of Lightning, from a table in the source. No checkpoint reaches
# it.
BY_NAME = {
    (f"{file}.py", "importlib.import_module")
    for file in (
        *(
            "commhooks/import_path",
            "commhooks/tools/cli",
            "commhooks/registry",
            "commhooks/hook/kinds",
        ),
        "lightning_commhooks/packages",
    )
}
RUNS_WHAT_IT_READS = {
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "pkgutil.resolve_name"),
    *(
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "runpy",
        "copyreg",
    ),
    *(
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "yaml.Loader",
        "yaml.UnsafeLoader",
    ),
    *(
        "torch.hub",
        "torch.package",
        "torch.jit.load",
        "torch.serialization",
        "os.system",
        "os.popen",
    ),
}


def _dangerous(of_file: list[ast.AST]) -> list[str]:
    """Return names that could run a file, and each `torch.load` of more than weights."""
    dangerous = []
    mentioned = 0
    for node in of_file:
        names: list[str] = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            mentioned += "torch.load" in names
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            mentioned -= any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            )
        dangerous += [name for name in names if name in RUNS_WHAT_IT_READS]
        # also `load = torch.load`
        mentioned += isinstance(node, ast.Attribute) and names == ["torch.load"]
    return dangerous + ["torch.load"] * mentioned


def test_no_source_can_run_what_a_file_holds() -> None:
    assert len(nodes()) > 40
    assert {
        (file, name) for file, of_file in nodes().items() for name in _dangerous(of_file)
    } == BY_NAME


def test_no_tensor_becomes_an_array() -> None:
    """torch does not require numpy. `make wheel-test` trains where it is missing."""
    for file, of_file in nodes().items():
        called = {node.attr for node in of_file if isinstance(node, ast.Attribute)}
        assert called.isdisjoint(["numpy", "from_numpy"]), file


# ---- warnings go through `commhooks.errors.logger_of` or Lightning's `warn` only -----------------

HELPERS = {"commhooks/errors.py", "lightning_commhooks/strategy.py"}


def _warnings_without_prefix(of_file: list[ast.AST]) -> list[int]:
    """Return lines that warn without the prefix, through Lightning or `warnings`."""
    prefixed = {
        target.id
        for node in of_file
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "logger_of"
    }
    lines = []
    for node in of_file:
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "rank_zero_warn":
            lines.append(node.lineno)
        elif isinstance(called, ast.Attribute) and called.attr in ("warning", "warn") and node.args:
            as_torch = isinstance(node.args[0], ast.Constant) and str(
                node.args[0].value
            ).startswith("NOTE: Process")
            if not as_torch and not (
                isinstance(called.value, ast.Name) and called.value.id in prefixed
            ):
                lines.append(node.lineno)
    return lines


def test_every_warning_has_the_prefix() -> None:
    assert len(nodes()) > 100
    missing = {
        file: _warnings_without_prefix(of_file)
        for file, of_file in nodes().items()
        if file not in HELPERS
    }
    assert {file: lines for file, lines in missing.items() if lines} == {}


def test_warnings_have_the_prefix_and_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = logger_of("commhooks.test")
    with caplog.at_level(logging.INFO):
        logger.warning("%s of %d", "one", 2)
        logger.info("as it is")
    assert [record.getMessage() for record in caplog.records] == ["commhooks: one of 2", "as it is"]
    assert {record.filename for record in caplog.records} == {"test_sources.py"}
