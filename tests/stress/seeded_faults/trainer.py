"""Seeded faults. `accelerate_commhooks.transformers`."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "Trainer: on SIGTERM the hook is saved a step ahead of the weights",
        "accelerate_commhooks/transformers.py",
        "        save_between_steps(self)\n",
        "",
        "with_transformers/test_transformers_jit.py",
    ),
    Mutant(
        "Trainer: resume loads nothing",
        "accelerate_commhooks/transformers.py",
        "                saved_hooks(trainer.accelerator).load(trainer._resume_folder)\n",
        "                pass\n",
        "with_transformers/test_transformers_trainer.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "Trainer: True is not looked up",
        "accelerate_commhooks/transformers.py",
        "get_last_checkpoint(self.args.output_dir) or True",
        "True",
        "with_transformers/test_transformers_trainer.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "Trainer: the memory of the last train()",
        "accelerate_commhooks/transformers.py",
        "        if self._hook_handler.is_attached(self.model_wrapped):\n",
        "        if False:\n",
        "with_transformers/test_transformers_wraps_anew.py::test_a_second_train_is_fresh_unless_it_resumes",
    ),
    Mutant(
        "Trainer: the length of the run is not told",
        "accelerate_commhooks/transformers.py",
        "self._given_total_steps or max_steps",
        "self._given_total_steps",
        "with_transformers/test_transformers_wraps_anew.py::test_default_start_is_a_tenth_of_the_run_and_total_steps_goes_first",
    ),
    Mutant(
        "Trainer: its DDP arguments are lost",
        "accelerate_commhooks/transformers.py",
        "                setattr(self._hook_handler, name, value)\n",
        "                pass\n",
        "with_transformers/test_transformers_settings.py::test_ddp_arguments_and_a_handler_of_the_users",
    ),
    Mutant(
        "Trainer: the handler's DDP arguments are lost",
        "accelerate_commhooks/transformers.py",
        "value if value != default[name] else trainers_own[name]",
        "trainers_own[name]",
        "with_transformers/test_transformers_settings.py::test_ddp_arguments_and_a_handler_of_the_users",
    ),
    Mutant(
        "Trainer: only the first accelerator has the hook",
        "accelerate_commhooks/transformers.py",
        "        self._hook_handler.attach(self.accelerator)\n",
        '        hasattr(self, "control") or self._hook_handler.attach(self.accelerator)\n',
        "with_transformers/test_transformers_wraps_anew.py::test_hyperparameter_search_keeps_the_hook",
    ),
    Mutant(
        "Trainer: hook files beside a model alone",
        "accelerate_commhooks/transformers.py",
        " and not self.args.save_only_model and self.comm_hook",
        " and self.comm_hook",
        "with_transformers/test_transformers_trainer.py::test_without_the_hooks_files_the_resumed_run_differs",
    ),
    Mutant(
        "Trainer: a model outside of DDP is accepted",
        "accelerate_commhooks/transformers.py",
        "        elif trainer.accelerator.num_processes > 1:\n",
        "        elif False:\n",
        "with_transformers/test_transformers_settings.py::test_a_model_that_is_not_in_ddp_is_an_error",
    ),
]
