"""Seeded faults. `commhooks plan` and `commhooks inspect`."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "plan: the codec is timed without the globs of the ranks",
        "commhooks/engine/loopback.py",
        "ParameterInfo.of(name, p, names, config) for",
        "ParameterInfo(name, p) for",
        "tools/test_codec_time.py",
    ),
    Mutant(
        "plan: a bucket of which nothing is compressed is exchanged",
        "commhooks/engine/loopback.py",
        "            compresses = not compressor.transactional or any(plan.compressed for plan in plans)\n",
        "            compresses = True\n",
        "engine/test_simulation.py",
    ),
    Mutant(
        "plan: the first bucket has no cap of its own",
        "commhooks/gradients/bucket_estimate.py",
        "    if bucket_cap_mb is None:\n",
        "    if False:\n",
        "hook/test_plan_model.py::test_buckets_are_those_of_ddp_after_the_first_step",
    ),
    Mutant(
        "plan: the learned P of alternate is forgotten in the memory",
        "commhooks/compressors/powersgd/plan.py",
        "kept = p.rank * (p.n + p.m if p.alternate else p.m)",
        "kept = p.rank * p.m",
        "hook/test_plan_model.py::test_the_memory_that_is_planned_is_taken",
    ),
    Mutant(
        "plan: noop sends",
        "commhooks/hook/plan_model.py",
        "sends=compressor.config.sends",
        "sends=True",
        "hook/test_plan_model.py::test_the_same_as_the_attached_hook",
    ),
    Mutant(
        "plan: the break-even leaves the ring out",
        "commhooks/hook/plan.py",
        "Network(world_size, 1e9).seconds(saved)",
        "saved * 8 / 1e9",
        "hook/test_plan_model.py::test_the_break_even_is_where_both_are_as_fast",
    ),
    Mutant(
        "plan and inspect run what a file says",
        "commhooks/tools/named_model.py",
        "weights_only=True, mmap=lazily",
        "weights_only=False, mmap=lazily",
        "tools/test_inspect.py::test_nothing_in_a_file_is_executed",
    ),
    Mutant(
        "inspect: damage ends well",
        "commhooks/tools/inspect/command.py",
        "return 1 if any(",
        "return 0 if any(",
        "tools/test_inspect.py::test_damage_is_named",
    ),
    Mutant(
        "inspect: a missing part is not told",
        "commhooks/tools/inspect/payload.py",
        "if rank not in parts]",
        "if rank < 0]",
        "tools/test_inspect.py::test_parts_that_are_missing_or_of_another_save",
    ),
    Mutant(
        "inspect: control characters reach the terminal",
        "commhooks/tools/named_model.py",
        "return text if text.isprintable() else repr(text)",
        "return text",
        "tools/test_inspect.py::test_what_a_stranger_named_cannot_steer_the_terminal",
    ),
]
