"""Files of settings as accidents or malice would make them: each gives a handler, or a `CommHookError` that names the
file. Nothing in it is run."""

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate_commhooks import CommHookKwargs
from commhooks import CommHookError, HookConfigError
from tests.checkpoint import hostile

HOOKS: list[dict[str, Any]] = [
    {"hook": "powerSGD", "wrapper": "bf16", "hook_options": {"matrix_approximation_rank": 2, "exclude": ["*embed*"]}},
    {"hook": "powerSGD", "hook_options": {"matrix_approximation_rank": 4}, "bucket_cap_mb": 12.5},
    {"hook": "int8", "hook_options": {"block_size": 64, "start_iter": 0.1}, "ranks_per_node": "auto"},
    {"hook": "int4", "ranks_per_node": 2, "save_residual": "mean"},
    {"hook": "auto", "hook_options": {"quality": "close", "measure_steps": 9}, "strict": False},
    {"hook": "diloco", "hook_options": {"sync_every": 20, "wire": "int8", "fragments": 2, "delay": 3}},
    {"hook": "local_sgd", "hook_options": {"sync_every": 4}, "total_steps": 1000},
]
TEXTS = [
    *("2001-99-99", "0x", "1e400", "-.inf", "!!int abc", "!!float x", "!!binary '*'", "!!timestamp x", "1" * 5000),
    *("[" * 2000, "{a: " * 200, "&a [*a]", "*nothing", "<<: 3", "{[a]: b}", "? ", "\x00", "\ud800", "${hook}", "${"),
    *("${oc.env:NO_SUCH_VARIABLE}", "${oc.decode:'['}", "???", "'", '"\\x', "%TAG", "--- 1\n--- 2", "!!set {a}"),
    "&a [&b [x, x], &c [*b, *b], &d [*c, *c], &e [*d, *d], &f [*e, *e], *f, *f]",
]


def _file_of(rng: random.Random, trap: Path) -> tuple[bytes, str]:
    """The content of a file, and what was done."""
    section = copy.deepcopy(rng.choice(HOOKS))
    document = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "comm_hook_config": section}
    good: Any = rng.choice([document, section])
    kind = rng.random()
    if kind < 0.3:
        return hostile.damaged_bytes(yaml.safe_dump(good).encode(), rng)
    if kind < 0.6:
        malice = [f"!!python/object/apply:os.mkdir ['{trap}']", f"!!python/object/new:os.mkdir ['{trap}']"]
        text = rng.choice([*TEXTS, *malice])
        path = rng.choice(hostile.places(good))
        hostile.put(good, path, "HERE")
        return yaml.safe_dump(good).replace("HERE", text).encode("utf-8", "surrogatepass"), f"{path}: {text[:50]}"
    changed, what = hostile.changed(good, rng.choice(HOOKS), rng)
    try:
        return yaml.dump(changed).encode("utf-8", "surrogatepass"), what
    except (RecursionError, ValueError, TypeError, NotImplementedError):  # not everything can be written
        return b"", what


@pytest.mark.parametrize("value", ["!!int abc", "!!timestamp x", "1" * 5000, "[" * 2000])
def test_what_the_reader_of_yaml_stumbles_over_is_told(tmp_path: Path, value: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"hook: int8\nhook_options:\n  block_size: {value}\n")
    with pytest.raises(HookConfigError, match="settings.yaml is not YAML: "):
        CommHookKwargs.from_config(file)


def test_changed_files_of_settings(tmp_path: Path) -> None:
    rng, file, trap, count, taken = random.Random(5), tmp_path / "settings.yaml", tmp_path / "trap", 0, 0
    for number in range(30 * hostile.TIMES):
        content, what = _file_of(rng, trap)
        file.write_bytes(content)
        started = time.monotonic()
        try:
            CommHookKwargs.from_config(file)
            taken += 1
        except CommHookError as error:
            assert str(file) in str(error), (number, what, error)
        except BaseException as error:
            raise AssertionError(f"number {number}: {what}: {content[:300]!r}") from error
        assert time.monotonic() - started < 10, (number, what)
        count += 1
    assert not trap.exists()
    print(f"settings: {count} files, {taken} accepted, the others refused")
    assert 0.05 * count < taken < 0.8 * count
