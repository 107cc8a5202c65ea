"""Seeded faults. `commhooks doctor`."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "the doctor leaves the random state moved",
        "commhooks/tools/doctor/run.py",
        "    finally:\n        random_state.restore()\n",
        "    finally:\n",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor measures the model itself",
        "commhooks/tools/doctor/copies.py",
        "copy.deepcopy(ddp_model.module)",
        "ddp_model.module",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor keeps its copies",
        "commhooks/tools/doctor/measure.py",
        "gc.collect(generation)",
        "pass",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor's candidates never change places",
        "commhooks/tools/doctor/measure.py",
        "first = turn * len(order) // rounds",
        "first = 0 * turn",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "printing the doctor's report draws a random number",
        "commhooks/tools/doctor/report.py",
        "            random.setstate(state)\n",
        "            pass\n",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "each rank believes its own clock",
        "commhooks/tools/doctor/measure.py",
        "measured.step_ms.append(1000 * max(step))",
        "measured.step_ms.append(1000 * passed)",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "a slow rank's delay is taken for the network",
        "commhooks/tools/doctor/measure.py",
        "1000 * min(waiting)",
        "1000 * max(waiting)",
        "tools/test_doctor.py::test_the_slowest_rank_decides_and_options",
    ),
    Mutant(
        "a candidate of the doctor never ends",
        "commhooks/tools/doctor/measure.py",
        "            if measured.spent_s >= self.seconds:\n                break\n",
        "",
        "tools/test_doctor.py::test_the_slowest_rank_decides_and_options",
    ),
    Mutant(
        "the doctor's copies have other buckets",
        "commhooks/tools/doctor/copies.py",
        '            options["bucket_cap_mb"] = ddp_model.bucket_bytes_cap / 2**20\n',
        "            pass\n",
        "tools/test_doctor.py::test_copies_are_wrapped_as_the_model_is",
    ),
    Mutant(
        "the doctor advises where there is nothing to win",
        "commhooks/tools/doctor/judge.py",
        "    if headroom >= MARGIN:\n",
        "    if True:\n",
        "tools/test_doctor_advice.py::test_advice",
    ),
    Mutant(
        "the doctor advises what may be chance",
        "commhooks/tools/doctor/judge.py",
        " if each.quartiles_ms[1] < plain.quartiles_ms[0]",
        "",
        "tools/test_doctor_advice.py::test_advice",
    ),
    Mutant(
        "the doctor takes chance for the network on a slower link",
        "commhooks/tools/doctor/judge.py",
        "return measured.median_ms + (times_slower - 1) * here_ms",
        "return measured.median_ms + (times_slower - 1) * max(here_ms, measured.median_ms - noop.median_ms)",
        "tools/test_doctor_advice.py::test_noise_does_not_let_more_bytes_win_on_a_slow_link",
    ),
    Mutant(
        "the doctor runs a batch_fn that calls your own model",
        "commhooks/tools/doctor/check.py",
        '        raise DoctorError(f"batch_fn called your own model',
        '        return\n        raise DoctorError(f"batch_fn called your own model',
        "tools/test_doctor_errors.py::test_a_batch_fn_that_does_not_work",
    ),
    Mutant(
        "one rank's broken batch_fn is not told to the others",
        "commhooks/tools/doctor/check.py",
        "    if not any(failed):\n        return\n",
        "    if problem is None:\n        return\n",
        "tools/test_doctor_errors.py::test_where_it_fails_on_one_rank_all_of_them_end",
    ),
]
