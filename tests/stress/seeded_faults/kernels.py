"""Seeded faults. The kernel that all ranks share, and ranks on different machines."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "kernel: each rank chooses its own",
        "commhooks/engine/kernel_choice.py",
        "    if len(set(keys)) > 1:\n",
        "    if len(set(keys)) > len(keys):\n",
        "compressors/powersgd/test_native_kernel.py::test_one_machine_without_a_compiler",
    ),
    Mutant(
        "kernel: it reads numbers of another dtype",
        "commhooks/compressors/native/tables.py",
        "    fits = tensor.dtype == dtype and ",
        "    fits = ",
        "compressors/test_native_sources.py::test_c_gets_no_address_of_anything_else",
    ),
]
