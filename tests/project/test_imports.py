"""The import of a front end runs what every hook needs, and nothing for some hooks only."""

import json
import subprocess
from typing import Any

import pytest

from tests.support import warm
from tests.support.repository import PACKAGES

# The process may have imported commhooks before it was forked. What the framework itself imports
# does not count.
IMPORTED_BY = """
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
    del sys.modules[name]
before = set(sys.modules)
STATEMENT
print(json.dumps(sorted(set(sys.modules) - before)))
"""
FRONT_ENDS = {
    "import commhooks": "torch",
    "import commhooks; commhooks.attach, commhooks.PowerSGD": "torch",
    "import lightning_commhooks": "lightning.pytorch",
    "from lightning_commhooks.fabric import CommHookDDP": "lightning.pytorch",
    "from accelerate_commhooks import CommHookKwargs": "accelerate",
}
NOT_NEEDED = (
    "commhooks.auto.compressor",
    "commhooks.auto.watch",
    "commhooks.comm.membership",
    "commhooks.compressors.native",
    "commhooks.compressors.powersgd.compressor",
    "commhooks.compressors.quantized.compressor",
    "commhooks.local_steps.driver",
    "commhooks.members.",
    "commhooks.tools",
    "torchft",
    "triton",
)
"""Beginnings of the names of modules. `commhooks.members.options` is the class of an argument."""


@pytest.mark.parametrize("statement", FRONT_ENDS)
def test_an_import_runs_no_hook_command_membership_or_kernel(statement: str) -> None:
    script = IMPORTED_BY.replace("STATEMENT", statement).replace("PACKAGES", repr(PACKAGES))
    command = [warm.python(FRONT_ENDS[statement]), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names: list[Any] = json.loads(done.stdout)
    assert "commhooks" in names
    assert [
        name
        for name in names
        if name.startswith(NOT_NEEDED) and name != "commhooks.members.options"
    ] == []
