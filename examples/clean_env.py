"""Runs Python as if on a plain laptop, whatever cluster job or launcher this shell sits in.

    python examples/clean_env.py script.py --its --arguments
    python examples/clean_env.py -m pytest

Lightning, Accelerate and torch read the variables of batch systems and launchers and change what
they do: inside a SLURM job a script that wants two processes of its own would wait for a cluster
instead. So they are taken out, the CPU is chosen, threads are limited to one per process, and the
Hugging Face folder, where a user's default Accelerate configuration lives, is a temporary one. Only
the child process sees this. `tests/conftest.py` uses the same rule.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

CLEARED_PREFIXES = ("SLURM_", "MASTER_", "PL_", "ACCELERATE_", "TORCHELASTIC_")
CLEARED_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")


def is_cleared(name: str) -> bool:
    """Whether the environment variable `name` belongs to a batch system or a launcher."""
    return name in CLEARED_NAMES or name.startswith(CLEARED_PREFIXES)


def cleaned(environ: Mapping[str, str], hf_home: str, *, keep_cuda: bool = False) -> dict[str, str]:
    """A copy of `environ` without the cleared variables, on the CPU (unless `keep_cuda`), one
    thread per process.
    """
    env = {name: value for name, value in environ.items() if not is_cleared(name)}
    env["HF_HOME"] = hf_home
    env["OMP_NUM_THREADS"] = "1"
    if not keep_cuda:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def main(argv: list[str]) -> int:
    """Run `python *argv` in a cleaned environment; returns its exit status as a shell would (128 +
    signal number).
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    with tempfile.TemporaryDirectory(prefix="commhooks-hf-") as hf_home:
        process = subprocess.Popen([sys.executable, *argv], env=cleaned(os.environ, hf_home))
        # The terminal sends Ctrl-C to the child, too; ignore it here, so that this process does not
        # end first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda signum, frame: process.send_signal(signum))
        status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
