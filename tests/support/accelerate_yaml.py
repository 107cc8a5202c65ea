"""An Accelerate configuration file, with a section of ours in it; for the tests of settings as YAML."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
main_process_port: 0
mixed_precision: "no"
"""


def section(text: str) -> str:
    return ACCELERATE + "comm_hook_config:\n" + "".join(f"  {line}\n" for line in text.splitlines())


@contextmanager
def default_file(text: str) -> Iterator[Path]:
    """Accelerate's default configuration file, which holds `text` for as long as this is used as a context."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    try:
        yield path
    finally:
        path.unlink()
