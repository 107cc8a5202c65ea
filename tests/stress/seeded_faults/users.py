"""Seeded faults. What a user meets: no hook, counters and clocks, the doctor."""

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
    Mutant(
        "waiting is codec time",
        "commhooks/comm/clocks.py",
        "-seconds if waiting else seconds",
        "0.0 if waiting else seconds",
        "hook/test_metrics.py::test_waiting_is_not_codec_time",
    ),
    Mutant(
        "a sample of this rank alone",
        "commhooks/hook/cosine.py",
        "                dist.all_reduce(gradient, group=self._group())\n",
        "                pass\n",
        "hook/test_metrics.py::test_the_cosine_is_right_and_leaves_no_trace",
    ),
    Mutant(
        "the doctor leaves the random state moved",
        "commhooks/tools/doctor/run.py",
        "    finally:\n        restore_random()\n",
        "    finally:\n",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "each rank believes its own clock",
        "commhooks/tools/doctor/measure.py",
        "measured.step_ms.append(1000 * max(step))",
        "measured.step_ms.append(1000 * passed)",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
]
