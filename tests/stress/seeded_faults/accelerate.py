"""Seeded faults. `accelerate_commhooks`: the handler, `save_state` and `load_state`, settings, launcher, Trainer."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "Accelerate: no loss scale",
        "accelerate_commhooks/prepared.py",
        "        return scale_of(known.scaler, known.device)\n",
        "        return 1.0\n",
        "with_accelerate/test_accelerate_two_ranks.py::test_the_residual_follows_the_loss_scale",
    ),
    Mutant(
        "Accelerate: one learned state for two models",
        "accelerate_commhooks/handler.py",
        "        if self.attached_hooks and callable(",
        "        if False and callable(",
        "with_accelerate/test_accelerate_attached.py::test_one_learned_state_serves_one_model",
    ),
    Mutant(
        "Accelerate: old files of ranks stay",
        "accelerate_commhooks/saving.py",
        "                    yield _of_rank(path, rank), own  #",
        "                    if own: yield _of_rank(path, rank), own  #",
        "with_accelerate/test_accelerate_saving.py::test_drop_saves_no_residual",
    ),
    Mutant(
        "Accelerate: code of a checkpoint is run",
        "accelerate_commhooks/saving.py",
        'torch.load(path, map_location="cpu", weights_only=True))\n        except PayloadError',
        'torch.load(path, map_location="cpu", weights_only=False))\n        except PayloadError',
        "with_accelerate/test_accelerate_damaged_files.py::test_no_code_of_a_checkpoint_is_run",
    ),
    Mutant(
        "files of the hook change one by one",
        "accelerate_commhooks/atomic_write.py",
        "                    os.fsync(file.fileno())  #",
        "                    os.replace(beside, path)  #",
        "checkpoint/test_failed_writes.py::test_files_change_together_or_not_at_all",
    ),
    Mutant(
        "launcher: an ignored section is success",
        "accelerate_commhooks/launcher.py",
        "        if status == 0 and watched:\n",
        "        if False:\n",
        "with_accelerate/test_accelerate_launcher.py::test_a_script_that_ignores_the_section_fails",
    ),
    Mutant(
        "Trainer: on SIGTERM the hook is saved a step ahead of the weights",
        "accelerate_commhooks/transformers.py",
        "        save_between_steps(self)\n",
        "",
        "with_transformers/test_transformers_jit.py",
    ),
    Mutant(
        "Trainer: resume loads nothing",
        "accelerate_commhooks/trainer_callbacks.py",
        "                saved_hooks(trainer.accelerator).load(trainer._resume_folder)\n",
        "                pass\n",
        "with_transformers/test_transformers_trainer.py::test_resume_is_bit_equal",
    ),
]
