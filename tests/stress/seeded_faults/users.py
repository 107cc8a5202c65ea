"""Seeded faults. What a new user meets: no hook, mistakes in arguments, lines that are logged, commands."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "noop trains apart in silence",
        "commhooks/hook/engine_hook.py",
        "if not compressor.config.sends and self.world_size > 1:",
        "if False:",
        "hook/test_no_hook.py::test_noop_warns_and_marks_what_it_saves",
    ),
    Mutant(
        "one rank claims savings",
        "commhooks/hook/runner.py",
        "        if self.world_size == 1:\n",
        "        if False:\n",
        "engine/test_start_step.py::test_one_rank_is_told_that_it_sends_nothing",
    ),
    Mutant(
        "counters so far are counted twice",
        "commhooks/comm/counters.py",
        "saved.get(name, 0) - getattr(self, name)",
        "saved.get(name, 0)",
        "checkpoint/test_resumed.py::test_what_was_counted_goes_on",
    ),
]
