"""Seeded faults. The kernel that all ranks share, and ranks on different machines."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "kernel: ranks with different builds of it use it all the same",
        "commhooks/engine/kernel_choice.py",
        "if all(kernel in offer.kernels for offer in offers)]",
        "if all(kernel.name in [each.name for each in offer.kernels] for offer in offers)]",
        "compressors/powersgd/test_native_kernel.py::test_machines_whose_kernels_differ",
    ),
    Mutant(
        "kernel: each rank chooses its own",
        "commhooks/engine/kernel_choice.py",
        "    if len(set(keys)) > 1:\n",
        "    if len(set(keys)) > len(keys):\n",
        "compressors/powersgd/test_native_kernel.py::test_one_machine_without_a_compiler",
    ),
    Mutant(
        "kernel: a load goes back to torch",
        "commhooks/engine/session.py",
        "            compressor.kernel = self.choice.kernel\n",
        "            pass\n",
        "engine/test_kernel_choice.py::test_the_choice_outlives_a_load",
    ),
    Mutant(
        "kernel: a build is known by its source alone",
        "commhooks/compressors/powersgd/native_products.py",
        "        results += [residual, delta, products.q[0]]\n",
        "        results = []\n",
        "compressors/powersgd/test_native_kernel.py::test_a_build_is_known_by_its_bits",
    ),
    Mutant(
        "kernel: fused=False compiles one",
        "commhooks/compressors/native/choice.py",
        "    if fused is False or not library",
        "    if not library",
        "compressors/powersgd/test_native_kernel.py::test_fused_false_asks_for_no_compiler",
    ),
    Mutant(
        "kernel: a compiler that hangs is waited for",
        "commhooks/compressors/native/library.py",
        "timeout=COMPILE_LIMIT_S",
        "timeout=None",
        "compressors/powersgd/test_fused_kernel.py::test_a_compiler_that_hangs",
    ),
    Mutant(
        "kernel: it reads numbers of another dtype",
        "commhooks/compressors/native/tables.py",
        "    if tensor.dtype != dtype or ",
        "    if ",
        "compressors/test_native_sources.py::test_c_gets_no_address_of_anything_else",
    ),
    Mutant(
        "kernel: whatever lies beside its source is part of it",
        "commhooks/compressors/native/library.py",
        'folder.glob("*.h")',
        'folder.glob("*")',
        "compressors/test_native_sources.py::test_stray_files_are_no_part_of_a_kernel",
    ),
    Mutant(
        "machines: different ones are warned of although the weights are compared",
        "commhooks/engine/kernel_choice.py",
        "        if self.drift and not checked:\n",
        "        if self.drift:\n",
        "engine/test_kernel_choice.py::test_different_machines",
    ),
]
