"""Seeded faults. `accelerate_commhooks`: the handler, `save_state` and `load_state`, settings, launcher, Trainer."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "Trainer: what is given in the handler counts only if it is not DDP's default",
        "accelerate_commhooks/transformers.py",
        "if name not in handler.given and users == default[name]:",
        "if users == default[name]:",
        "with_transformers/test_transformers_settings.py::test_ddp_arguments_and_a_handler_of_the_users",
    ),
    Mutant(
        "Accelerate: no loss scale",
        "accelerate_commhooks/prepared.py",
        "        return scale_of(known.scaler, known.device)\n",
        "        return 1.0\n",
        "with_accelerate/test_accelerate_saving.py::test_the_loss_scale_is_saved_with_the_residual",
    ),
    Mutant(
        "Accelerate: old files of ranks stay",
        "accelerate_commhooks/saving.py",
        "                    yield _of_rank(path, rank), own  #",
        "                    if own: yield _of_rank(path, rank), own  #",
        "with_accelerate/test_accelerate_saving.py::test_drop_saves_no_residual",
    ),
    Mutant(
        "Accelerate: files of a hook that is gone stay",
        "accelerate_commhooks/saving.py",
        "                if (number, is_sharded) not in kept and read.is_file():\n",
        "                if False:\n",
        "with_accelerate/test_accelerate_saved_over.py::test_nothing_of_an_old_hook_stays",
    ),
    Mutant(
        "Accelerate: one process knows nothing of the files of a hook",
        "accelerate_commhooks/handler.py",
        "            accelerator.save_state = RegisteringSave(accelerator)\n",
        "            pass\n",
        "with_accelerate/test_accelerate_saved_over.py::test_two_ranks_one_and_two_again",
    ),
    Mutant(
        "files of the hook change one by one",
        "accelerate_commhooks/atomic_write.py",
        "                    os.fsync(file.fileno())  #",
        "                    os.replace(beside, path)  #",
        "checkpoint/test_failed_writes.py::test_files_change_together_or_not_at_all",
    ),
    Mutant(
        "FSDP2 of Accelerate: it averages over the replicas itself",
        "accelerate_commhooks/replicas.py",
        "if name != _REPLICAS]",
        "]",
        "with_accelerate/test_accelerate_replicas.py::test_exact_averages_are_those_of_native_hsdp",
    ),
    Mutant(
        "FSDP2 of Accelerate: the round does not end before the weights are saved",
        "accelerate_commhooks/replicas.py",
        "            hook.synchronize(optimizers=True)\n",
        "            pass\n",
        "with_accelerate/test_accelerate_replicas.py::test_every_hook_trains_saves_and_resumes",
    ),
    Mutant(
        "FSDP2 of Accelerate: a model that is sharded over all ranks is not refused",
        "accelerate_commhooks/replicas.py",
        "    if config is None:",
        "    if False:",
        "with_accelerate/test_accelerate_replicas.py::test_what_cannot_work_is_refused_with_what_to_do",
    ),
    Mutant(
        "replicate: parameters have the names of DDP's list",
        "commhooks/gradients/ddp.py",
        "        user_module = ddp_model.module if module is None else module\n",
        "        user_module = ddp_model.module\n",
        "hook/test_replicate.py::test_it_is_compressed_saved_and_resumed",
    ),
    Mutant(
        "Trainer: on SIGTERM the hook is saved a step ahead of the weights",
        "accelerate_commhooks/transformers.py",
        "        save_between_steps(self)\n",
        "",
        "with_transformers/test_transformers_jit.py",
    ),
]
