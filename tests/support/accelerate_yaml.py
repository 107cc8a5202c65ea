"""An Accelerate configuration file, with a section of ours in it; for the tests of settings as YAML."""

from __future__ import annotations

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"


def section(text: str) -> str:
    return ACCELERATE + "comm_hook_config:\n" + "".join(f"  {line}\n" for line in text.splitlines())
