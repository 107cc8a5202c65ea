"""Seeded faults. `commhooks plan` and `commhooks inspect`."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "plan: noop sends",
        "commhooks/hook/plan_model.py",
        "sends=compressor.config.sends",
        "sends=True",
        "hook/test_plan_model.py::test_the_same_as_the_attached_hook",
    ),
    Mutant(
        "plan and inspect run what a file says",
        "commhooks/tools/named_model.py",
        "weights_only=True, mmap=lazily",
        "weights_only=False, mmap=lazily",
        "tools/test_inspect.py::test_nothing_in_a_file_is_executed",
    ),
]
