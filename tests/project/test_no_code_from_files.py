"""No source of the packages can run what a file holds: a look at the sources; `test_hostile_files.py` plants code."""

import ast

from tests.support.repository import sources

# What imports by name: what a user's configuration or command line names; the subcommands and packages of Lightning,
# from a table in the source. No checkpoint reaches it.
BY_NAME = {
    (f"{file}.py", "importlib.import_module")
    for file in ("commhooks/request", "commhooks/tools/cli", "lightning_commhooks/class_factory")
}
RUNS_WHAT_IT_READS = {
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "pkgutil.resolve_name"),
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "copyreg"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("torch.hub", "torch.package", "torch.jit.load", "torch.serialization", "os.system", "os.popen"),
}


def dangerous(source: str) -> list[str]:
    """The names by which a Python source could run a file, and each `torch.load` that is not weights_only=True."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, (ast.Name, ast.Attribute)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
        found += [name for name in names if name in RUNS_WHAT_IT_READS]
        if isinstance(node, ast.ImportFrom) and f"{node.module}" == "torch":
            found += ["torch.load" for each in node.names if each.name == "load"]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
            found += [] if safe else ["torch.load"]
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # Under another name (`load = torch.load`) it would not be seen above.
    mentioned = sum(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load" for node in ast.walk(tree))
    return found + ["torch.load"] * (mentioned - calls.count("torch.load"))


def test_no_source_can_run_what_a_file_holds() -> None:
    assert len(sources()) > 40
    assert {(file, name) for file, text in sources().items() for name in dangerous(text)} == BY_NAME
