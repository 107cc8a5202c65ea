"""Seeded faults: each is put into a copy of the packages, and the test named beside it, which passes
without it, must fail there.

    python tests/mutants.py [NAME ...]          # all of them, or those whose name contains one of the words

A test that passes on a broken program guards nothing. Run by `make test-mutants`; takes some minutes.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("commhooks", "lightning_commhooks", "accelerate_commhooks", "tests", "examples", "pyproject.toml")
TIME_LIMIT_S = 240


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs exactly once in `file`, becomes `new`; then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(
        "alternate: P and Q do not take turns",
        "commhooks/alternating_exchange.py",
        "            self._memory.p_is_newer.add(matrix.name)\n",
        "            pass\n",
        "test_variants.py::test_gradients_and_residuals_equal_the_oracle",
    ),
    Mutant(
        "alternate: what is not finite is clamped",
        "commhooks/wire.py",
        "    out.add_(bad.to(out.dtype))\n",
        "    out.add_(0 * torch.nan_to_num(bad).to(out.dtype))\n",
        "test_variants.py::test_a_nonfinite_step_did_not_happen",
    ),
    Mutant(
        "alternate: whose turn it is is not saved",
        "commhooks/payload.py",
        "                memory.p_is_newer.add(name)\n",
        "                pass\n",
        "test_variants.py::test_resume_is_exact",
    ),
    Mutant(
        "fused: the end of a row is left out",
        "commhooks/fused_codec.c",
        "                for (int k = 0; k < R; k++) rest[k] += delta[j] * q[k * m + j];",
        "                ;                                                             ",
        "test_codec.py::test_products",
    ),
    Mutant(
        "fused: ranks beyond four add the residual again",
        "commhooks/fused_codec.c",
        "residual && k == 0 ? residual",
        "residual ? residual",
        "test_codec.py::test_products",
    ),
    Mutant(
        "the host waits in every step of the warm-up",
        "commhooks/registration.py",
        "before_start = self.memory.step < self.start_step <=",
        "before_start = self.memory.step < self.start_step or 0 <",
        "test_masked_commit.py::test_the_host_asks_once_when_compression_may_begin",
    ),
    Mutant(
        "replicas that differ go unseen",
        "commhooks/replica_check.py",
        "        if others:\n",
        "        if len(others) == len(rows):\n",
        "test_divergence.py::test_one_changed_bit_is_found",
    ),
    Mutant(
        "a fingerprint without the order",
        "commhooks/replica_check.py",
        "(columns * (factors | 1)).sum()",
        "columns.sum() + 0 * factors[0]",
        "test_divergence.py::test_a_fingerprint_sees_every_bit_and_the_order",
    ),
    Mutant(
        "ranks without data are compared",
        "commhooks/comm_hook.py",
        "taking_part=in_backward()",
        "taking_part=True or in_backward()",
        "test_divergence.py::test_a_rank_without_data_is_left_out",
    ),
    Mutant(
        "nobody asks what the others attach",
        "commhooks/attach.py",
        "    check_requests(request, ",
        "    _ = (check_requests, request, ",
        "test_disagreement.py::test_different_requests",
    ),
    Mutant(
        "only the rank without a compiler knows",
        "commhooks/attach.py",
        "    except HookConfigError as error:\n        return error\n",
        "    except HookConfigError:\n        raise\n",
        "test_fused_kernel.py::test_one_rank_without_a_compiler",
    ),
    Mutant(
        "fused: a damaged file is not made anew",
        "commhooks/fused_codec.py",
        "    if library.exists():\n        with contextlib.suppress(OSError):",
        "    if library.exists():\n        with contextlib.suppress(KeyError):",
        "test_fused_kernel.py::test_a_kept_file_that_is_damaged_is_made_anew",
    ),
    Mutant(
        "residual not updated",
        "commhooks/lowrank_exchange.py",
        "            s.products.split(delta, (s.p[i], s.q[i]), (s.p[i], q), matrix.rank, residual)\n        else:",
        "            self._store_gradient(i, matrix, delta, q)\n        else:",
        "test_resume.py::test_what_a_resume_needs",
    ),
    Mutant(
        "rank 0's residual everywhere",
        "commhooks/payload.py",
        "        place = ranks.index(target.rank)\n",
        "        place = 0\n",
        "test_resume.py::test_residuals_of_all_ranks_in_one_file",
    ),
    Mutant(
        "a newer version is not told",
        "commhooks/payload_checks.py",
        "        if type(version) is int and version > VERSION:\n",
        "        if False:\n",
        "test_golden_payloads.py::test_a_newer_version_is_refused_by_name",
    ),
    Mutant(
        "the payload has another key",
        "commhooks/payload.py",
        '        "hook_state": None,\n',
        '        "hook_state": None,\n        "new": 1,\n',
        "test_golden_payloads.py::test_the_form_is_that_of_the_files",
    ),
    Mutant(
        "residuals are saved in double precision",
        "commhooks/payload.py",
        '    return to_logical(flat.detach().to("cpu", copy=True), parameter).contiguous()\n',
        '    return to_logical(flat.detach().to("cpu", torch.float64, copy=True), parameter).contiguous()\n',
        "test_golden_payloads.py::test_the_form_is_that_of_the_files",
    ),
    Mutant(
        "rows of Q in another order",
        "commhooks/payload.py",
        '    q = _q_to_memory(entry["q"].detach(), parameter)\n',
        '    q = _q_to_memory(entry["q"].detach(), parameter).flip(0)\n',
        "test_golden_payloads.py::test_step_start_q_and_residuals_are_those_of_the_file",
    ),
    Mutant(
        "inexact for ever after a commit that failed",
        "commhooks/pipeline.py",
        "                self._memory.residual_missing = False\n",
        "",
        "test_changed_surroundings.py::test_after_a_commit_that_failed_the_next_one_is_whole_again",
    ),
    Mutant(
        "every rank warns of the same inexact save",
        "commhooks/saved_state.py",
        "        if self._rank != speaker:\n            return\n",
        "",
        "test_joint_save.py::test_one_rank_warns",
    ),
    Mutant(
        "a rank that saves alone is not warned",
        "commhooks/joint_save.py",
        "            self.speaker = int(decision)",
        "            self.speaker = 0",
        "test_joint_save.py::test_one_rank_warns",
    ),
    Mutant(
        "another hook's state leaves a running hook as it is",
        "commhooks/comm_hook.py",
        "        return self._saved_state.begin_anew\n",
        "        return lambda: None\n",
        "test_changed_setup.py::test_another_hook",
    ),
    Mutant(
        "a start step that was loaded outlives its state",
        "commhooks/saved_state.py",
        "        self._adopt(Memory(), self._first_start)\n",
        "        self._adopt(Memory(), self._state.start_powerSGD_iter)\n",
        "test_changed_setup.py::test_another_hook",
    ),
    Mutant(
        "residuals of what is compressed no longer are kept",
        "commhooks/saved_state.py",
        "            del memory.residuals[name]\n",
        "            pass\n",
        "test_changed_setup.py::test_what_is_compressed_no_longer_has_no_residual",
    ),
    Mutant(
        "names with the prefix of torch.compile",
        "commhooks/attach.py",
        'name.replace("_orig_mod.", "")',
        "name",
        "test_changed_setup.py::test_changes_that_a_state_does_not_know_of",
    ),
    Mutant(
        "strict loading changes the hook before it raises",
        "commhooks/payload.py",
        "    for name in parameters:\n        if name not in target.parameters:\n",
        "    for name in parameters:\n        if name in target.parameters:\n"
        "            target.parameters[name].data.zero_()\n        if name not in target.parameters:\n",
        "test_changed_setup.py::test_another_model",
    ),
    Mutant(
        "another world takes the residual of rank 0",
        "commhooks/payload.py",
        "        return lambda saved: torch.stack(saved).mean(0)\n",
        "        return lambda saved: saved[0]\n",
        "test_elastic_resume.py::test_from_any_number_of_ranks",
    ),
    Mutant(
        "another world takes the sum of the parts",
        "commhooks/payload_parts.py",
        '        residuals = {name: residual / shared["world_size"] for name, residual in total.items()}\n',
        "        residuals = dict(total)\n",
        "test_elastic_resume.py::test_from_any_number_of_ranks",
    ),
    Mutant(
        "the residual is not sent with the next step",
        "commhooks/lowrank_exchange.py",
        "flat[begin : begin + slot.numel].add_(residual, alpha=self._residual_factor)",
        "pass",
        "test_elastic_resume.py::test_without_residuals_the_chain_does_not_follow",
    ),
    Mutant(
        "one rank's file for another",
        "commhooks/payload.py",
        "    if world_size == target.world_size and target.rank in ranks:\n        place = ranks.index(target.rank)\n",
        "    if world_size == target.world_size:\n        place = 0\n",
        "test_resume.py::test_the_residual_of_another_rank_is_never_used",
    ),
    Mutant(
        "ranks do not compare their state",
        "commhooks/agreement.py",
        "    if not complete:\n        memory.drop_residuals()\n",
        "",
        "test_resume.py::test_the_residual_of_another_rank_is_never_used",
    ),
    Mutant(
        "Q not restored",
        "commhooks/payload.py",
        "                memory.q[name] = q.to(parameter.device, compute_dtype(parameter.dtype))\n",
        "                pass\n",
        "test_resume.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "step not restored",
        "commhooks/saved_state.py",
        "            state._options = dataclasses.replace(",
        "            own.step = 0\n            state._options = dataclasses.replace(",
        "test_resume.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "saved start does not win",
        "commhooks/registration.py",
        "        self.options, self.start_step = options, options.start_powerSGD_iter\n",
        "        self.options = options\n",
        "test_resume.py::test_loading_into_a_running_hook",
    ),
    Mutant(
        "residuals reset at the rebuild",
        "commhooks/registration.py",
        "            layout = read_layout(bucket)\n",
        "            layout = read_layout(bucket)\n            self.memory.residuals.clear()\n",
        "test_layout_independence.py",
    ),
    Mutant(
        "bucket index as key",
        "commhooks/registration.py",
        "            names = self.names.of_bucket(layout.parameters, first)\n",
        '            names = [f"{bucket.index()}.{place}" for place in range(len(layout.slots))]\n',
        "test_layout_independence.py",
    ),
    Mutant(
        "places counted from the first bucket",
        "commhooks/names.py",
        "        for parameter in reversed(parameters):\n",
        "        for parameter in parameters:\n",
        "test_dropin_state.py",
    ),
    Mutant(
        "commit before the last P",
        "commhooks/pipeline.py",
        "            exchange.commit(verdict)\n",
        "            exchange.commit(bool(exchange.finish()))\n",
        "test_nonfinite.py",
    ),
    Mutant(
        "non-finite numbers not noticed",
        "commhooks/wire.py",
        "    return torch.isfinite(low) & torch.isfinite(high)\n",
        "    return torch.ones((), dtype=torch.bool, device=reduced.device)\n",
        "test_nonfinite.py",
    ),
    Mutant(
        "large numbers clamped for ever",
        "commhooks/lowrank_exchange.py",
        "        put_overflow(gradient, flag)\n",
        "",
        "test_hard_gradients.py::test_huge_ones_are_worked_off_or_refused",
    ),
    Mutant(
        "P Q^T overflows a bucket of float16",
        "commhooks/wire.py",
        " / math.sqrt(len(factor))\n",
        "\n",
        "test_hard_gradients.py::test_huge_ones_are_worked_off_or_refused",
    ),
    Mutant(
        "the loss scale of a skipped step",
        "commhooks/pipeline.py",
        "            if verdict is not False:\n                self._memory.loss_scale",
        "            if True:\n                self._memory.loss_scale",
        "test_loss_scale.py::test_a_changing_scale_changes_nothing",
    ),
    Mutant(
        "one memory for all states of a process",
        "commhooks/ddp_comm_hooks/powerSGD_hook.py",
        "        self._memory = Memory()\n",
        '        self._memory = globals().setdefault("_shared", Memory())\n',
        "test_two_models.py::test_two_backward_passes_in_one_graph",
    ),
    Mutant(
        "the buckets of every pass are kept",
        "commhooks/pipeline.py",
        "        flight.done = True\n",
        '        flight.done = True\n        self.__dict__.setdefault("kept", []).append(flight)\n',
        "test_soak.py",
    ),
    Mutant(
        "non-finite steps are counted",
        "commhooks/pipeline.py",
        "        self._memory.step += committed\n",
        "        self._memory.step += passes\n",
        "test_nonfinite.py",
    ),
    Mutant(
        "wait inside the hook",
        "commhooks/pipeline.py",
        "                self._advance(flight, len(flight.exchanges) - 1)\n",
        "                self._advance(flight, len(flight.exchanges))\n",
        "test_collectives.py",
    ),
    Mutant(
        "Q of a bucket before P of the next",
        "commhooks/pipeline.py",
        "                    exchange.start()\n                    self._advance(flight, len(flight.exchanges) - 1)\n",
        "                    self._advance(flight, len(flight.exchanges) - 1)\n                    exchange.start()\n",
        "test_collectives.py",
    ),
    Mutant(
        "residual of the averaged projection",
        "commhooks/lowrank_exchange.py",
        "(delta, (s.p[i], s.q[i]), (s.p[i], q), matrix.rank, residual)\n        else:",
        "(delta, (s.p[i], q), (s.p[i], q), matrix.rank, residual)\n        else:",
        "test_powersgd_against_oracle.py",
    ),
    Mutant(
        "rounding of the wire not fed back",
        "commhooks/wire.py",
        "    factor.copy_(out)\n    factor.mul_(world_size)\n",
        "",
        "test_powersgd_cases.py",
    ),
    Mutant(
        "Q not scaled",
        "commhooks/lowrank_exchange.py",
        "        if self._on_host and not missing.any():\n            return rows\n",
        "        if self._on_host and not missing.any():\n            return q\n",
        "test_fp16_wire.py",
    ),
    Mutant(
        "missing directions not refilled",
        "commhooks/lowrank_exchange.py",
        "        refill, _ = codec.unit_rows(",
        "        return rows\n        refill, _ = codec.unit_rows(",
        "test_idle_layers.py",
    ),
    Mutant(
        "idle parameters lose their residual",
        "commhooks/lowrank_exchange.py",
        "        if good and not alive:\n",
        "        if False:\n",
        "test_idle_layers.py",
    ),
    Mutant(
        "starts one step late",
        "commhooks/registration.py",
        "        compressing = self.memory.step >= self.start_step\n",
        "        compressing = self.memory.step > self.start_step\n",
        "test_powersgd_cases.py",
    ),
    Mutant(
        "uncompressed tensors summed, not averaged",
        "commhooks/wire.py",
        "        torch.div(gradient, world_size, out=out)\n",
        "        out.copy_(gradient)\n",
        "test_powersgd_against_oracle.py",
    ),
    Mutant(
        "memory order taken for logical order",
        "commhooks/layout.py",
        "    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)\n",
        "    order = list(range(parameter.dim()))\n",
        "test_parameter_kinds.py",
    ),
    Mutant(
        "saving a mean leaves the residuals alone",
        "commhooks/saved_state.py",
        "                memory.residuals[name].copy_(collected[name])\n",
        "                pass\n",
        "test_resume.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "a joint save goes ahead without all ranks",
        "commhooks/joint_save.py",
        '        if decision != b"all":\n',
        "        if False:\n",
        "test_joint_save.py::test_rank_0_saves_alone",
    ),
    Mutant(
        "a failed save counts as a good one",
        "commhooks/joint_save.py",
        "        failures = [late] if outcome is None else [each for each in outcome if each]\n",
        "        failures: list[str] = []\n",
        "test_joint_save.py::test_a_failure_in_the_middle",
    ),
    Mutant(
        "a vote that came too late counts",
        "commhooks/joint_save.py",
        "        if decision is None:\n            return late\n",
        '        if decision is None:\n            return ""\n',
        "test_joint_save.py::test_a_rank_that_comes_too_late",
    ),
    Mutant(
        "a scaler that is gone still counts",
        "commhooks/registration.py",
        "if self.loss_scale is not None else 1.0\n",
        "if self.loss_scale is not None else self.memory.loss_scale\n",
        "test_changed_surroundings.py::test_residuals_of_a_scaler_that_is_gone",
    ),
    Mutant(
        "a torn commit goes unmarked",
        "commhooks/pipeline.py",
        "                self._memory.residuals.clear()\n                self._memory.residual_missing = True\n",
        "",
        "test_changed_surroundings.py::test_a_commit_that_fails_is_not_saved_as_a_whole_one",
    ),
    Mutant(
        "Q of zeros behind a mask",
        "commhooks/lowrank_exchange.py",
        "            q = self._options.draw_q(matrix, self._memory.step, self._scratch.dtype).to(self.buffer.device)\n"
        "            self._memory",
        "            q = torch.zeros(matrix.rank, matrix.m, dtype=self._scratch.dtype)\n            self._memory",
        "test_changed_surroundings.py::test_a_bad_first_step_leaves_nothing_behind_a_mask",
    ),
    Mutant(
        "the user's precision switches apply",
        "commhooks/arithmetic.py",
        '            switch.fp32_precision = "ieee"\n',
        "            pass\n",
        "test_arithmetic.py",
    ),
    Mutant(
        "residual does not follow the loss scale",
        "commhooks/registration.py",
        "        return Flight(compressing, loss_scale / self.memory.loss_scale, loss_scale, self.memory.step)\n",
        "        return Flight(compressing, 1.0, loss_scale, self.memory.step)\n",
        "test_loss_scale.py",
    ),
    Mutant(
        "Lightning does not restore",
        "lightning_commhooks/strategy.py",
        "        if take_over is not None:\n            take_over()\n",
        "        if take_over is not None:\n            pass\n",
        "test_lightning_resume.py",
    ),
    Mutant(
        "a stale file of a rank is taken",
        "commhooks/payload_parts.py",
        '    if part.get("fingerprint") != shared["fingerprint"]:\n',
        "    if False:\n",
        "test_accelerate_saving.py::test_save_on_the_main_process_only",
    ),
    Mutant(
        "a sum for a mean after another world size",
        "commhooks/payload_parts.py",
        '{name: residual / shared["world_size"] for name, residual in total.items()}',
        "dict(total)",
        "test_accelerate_saving.py::test_another_world_size",
    ),
    Mutant(
        "Accelerate: no loss scale",
        "accelerate_commhooks/handler.py",
        "return 1.0 if scaler is None else scaler.get_scale()",
        "return 1.0",
        "test_accelerate_two_ranks.py::test_the_residual_follows_the_loss_scale",
    ),
    Mutant(
        "Accelerate: hooks outlive their models",
        "accelerate_commhooks/hooked_models.py",
        "        self._hook = weakref.ref(hook)\n",
        "        self._hook = lambda: hook\n",
        "test_accelerate_attached.py::test_state_dies_with_its_model",
    ),
    Mutant(
        "Accelerate: equal to the stock handler",
        "accelerate_commhooks/handler.py",
        "return type(other) is type(self) and _values(self) == _values(other)",
        "return DistributedDataParallelKwargs.__eq__(self, other)",
        "test_accelerate_handler.py::test_equality_looks_at_the_class_and_all_fields",
    ),
    Mutant(
        "Accelerate: one learned state for two models",
        "accelerate_commhooks/handler.py",
        "        if learns and self.attached_hooks:\n",
        "        if False:\n",
        "test_accelerate_attached.py::test_one_learned_state_serves_one_model",
    ),
    Mutant(
        "Accelerate: old files of ranks stay",
        "accelerate_commhooks/saving.py",
        "                    files.remove(own_path)",
        "                    pass",
        "test_accelerate_saving.py::test_drop_saves_no_residual",
    ),
    Mutant(
        "Accelerate: nodes share one file",
        "accelerate_commhooks/saving.py",
        "accelerator.is_local_main_process if everywhere else accelerator.is_main_process",
        "accelerator.is_main_process",
        "test_accelerate_saving.py::test_save_on_each_node",
    ),
    Mutant(
        "Accelerate: code of a checkpoint is run",
        "accelerate_commhooks/saving.py",
        'torch.load(path, map_location="cpu", weights_only=True))\n        except PayloadError',
        'torch.load(path, map_location="cpu", weights_only=False))\n        except PayloadError',
        "test_accelerate_damaged_files.py::test_no_code_of_a_checkpoint_is_run",
    ),
    Mutant(
        "Accelerate: models are loaded one after the other",
        "accelerate_commhooks/saving.py",
        "                take_over.append(_checked(hook, saved, _path(folder, number)))\n",
        "                _checked(hook, saved, _path(folder, number))()\n",
        "test_accelerate_several_models.py::test_an_error_in_the_second_file_leaves_the_first_model_alone",
    ),
    Mutant(
        "Accelerate: what was loaded early is lost",
        "accelerate_commhooks/saving.py",
        "        self._loaded_early = early\n",
        "        self._loaded_early = {}\n",
        "test_accelerate_loading.py::test_load_before_prepare",
    ),
    Mutant(
        "Accelerate: free_memory goes unnoticed",
        "accelerate_commhooks/saving.py",
        "        if self._freed():\n            self._models = []\n",
        "",
        "test_accelerate_several_models.py::test_models_that_go_and_free_memory",
    ),
    Mutant(
        "Accelerate: numbers shift when a model goes",
        "accelerate_commhooks/saving.py",
        "            for number, model in enumerate(self._models):\n",
        "            for number, model in enumerate(m for m in self._models if m.hook):\n",
        "test_accelerate_several_models.py::test_models_that_go_and_free_memory",
    ),
    Mutant(
        "Accelerate: a module prepared twice gets two numbers",
        "accelerate_commhooks/saving.py",
        "if known.same_module(model)), len(self._models))",
        "if False), len(self._models))",
        "test_accelerate_several_models.py::test_a_module_that_is_prepared_twice_keeps_its_number",
    ),
    Mutant(
        "Accelerate: users' hooks decide which models are loaded",
        "accelerate_commhooks/saving.py",
        "        self.load(input_dir)\n",
        "        if models:\n            self.load(input_dir)\n",
        "test_accelerate_own_hooks.py::test_users_own_hooks_and_objects",
    ),
    Mutant(
        "Accelerate: nothing is saved",
        "accelerate_commhooks/saving.py",
        "        accelerator.register_save_state_pre_hook(self._save)\n",
        "",
        "test_accelerate_launch.py::test_resume_in_new_processes",
    ),
    Mutant(
        "steps of a memory that a load replaced",
        "commhooks/saved_state.py",
        "                registration.pipeline.settle()\n            own = state",
        "                pass\n            own = state",
        "test_masked_commit.py::test_steps_that_nobody_asked_about_do_not_count_after_a_load",
    ),
    Mutant(
        "Trainer: resume loads nothing",
        "accelerate_commhooks/transformers.py",
        "                saved_hooks(trainer.accelerator).load(trainer._resume_folder)\n",
        "                pass\n",
        "test_transformers_trainer.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "Trainer: True is not looked up",
        "accelerate_commhooks/transformers.py",
        "get_last_checkpoint(self.args.output_dir) or True",
        "True",
        "test_transformers_trainer.py::test_resume_is_bit_equal",
    ),
    Mutant(
        "Trainer: the memory of the last train()",
        "accelerate_commhooks/transformers.py",
        "        if self._hook_handler.is_attached(self.model_wrapped):\n",
        "        if False:\n",
        "test_transformers_wraps_anew.py::test_a_second_train_is_fresh_unless_it_resumes",
    ),
    Mutant(
        "Trainer: the length of the run is not told",
        "accelerate_commhooks/transformers.py",
        "self._given_total_steps or max_steps",
        "self._given_total_steps",
        "test_transformers_wraps_anew.py::test_default_start_is_a_tenth_of_the_run_and_total_steps_goes_first",
    ),
    Mutant(
        "Trainer: its DDP arguments are lost",
        "accelerate_commhooks/transformers.py",
        "                setattr(self._hook_handler, name, value)\n",
        "                pass\n",
        "test_transformers_settings.py::test_ddp_arguments_and_a_handler_of_the_users",
    ),
    Mutant(
        "Trainer: the handler's DDP arguments are lost",
        "accelerate_commhooks/transformers.py",
        "value if value != default[name] else trainers_own[name]",
        "trainers_own[name]",
        "test_transformers_settings.py::test_ddp_arguments_and_a_handler_of_the_users",
    ),
    Mutant(
        "Trainer: only the first accelerator has the hook",
        "accelerate_commhooks/transformers.py",
        "        self._hook_handler.attach(self.accelerator)\n",
        '        hasattr(self, "control") or self._hook_handler.attach(self.accelerator)\n',
        "test_transformers_wraps_anew.py::test_hyperparameter_search_keeps_the_hook",
    ),
    Mutant(
        "Trainer: hook files beside a model alone",
        "accelerate_commhooks/transformers.py",
        " and not self.args.save_only_model and self.comm_hook",
        " and self.comm_hook",
        "test_transformers_trainer.py::test_without_the_hooks_files_the_resumed_run_differs",
    ),
    Mutant(
        "Trainer: a model outside of DDP is accepted",
        "accelerate_commhooks/transformers.py",
        "        elif trainer.accelerator.num_processes > 1:\n",
        "        elif False:\n",
        "test_transformers_settings.py::test_a_model_that_is_not_in_ddp_is_an_error",
    ),
    Mutant(
        "YAML: the environment wins over an argument",
        "accelerate_commhooks/handler.py",
        'if name == "hook" or name not in self._given:',
        "if True:",
        "test_accelerate_environment.py::test_argument_over_environment_over_default",
    ),
    Mutant(
        "YAML: unknown keys pass",
        "accelerate_commhooks/yaml_config.py",
        "        if name not in allowed:\n",
        "        if False:\n",
        "test_accelerate_yaml.py::test_errors_say_where_and_why",
    ),
    Mutant(
        "YAML: interpolations do not see the file",
        "accelerate_commhooks/yaml_config.py",
        "        node = loaded[section] if section else loaded\n",
        "        node = OmegaConf.create(dict(loaded)[section] if section else loaded)\n",
        "test_accelerate_yaml.py::test_interpolations_see_the_whole_file",
    ),
    Mutant(
        "YAML: a hook of the script's own in silence",
        "accelerate_commhooks/handler.py",
        "            refuse_to_ignore_the_launcher(self.hook)\n",
        "            pass\n",
        "test_accelerate_environment.py::test_the_first_prepare_refuses_a_hook_of_the_scripts_own",
    ),
    Mutant(
        "YAML: config writes over the default file",
        "accelerate_commhooks/cli.py",
        "    if not args.force and path",
        "    if False and path",
        "test_accelerate_config_command.py::test_config_protects_the_default_file",
    ),
    Mutant(
        "launcher: the section stays in the file",
        "accelerate_commhooks/launcher.py",
        "content.pop(SECTION, None) is not None",
        "content.get(SECTION) is not None",
        "test_accelerate_launcher.py::test_the_workers_use_what_was_handed_over",
    ),
    Mutant(
        "launcher: an ignored section is success",
        "accelerate_commhooks/launcher.py",
        "        if status == 0 and watched:\n",
        "        if False:\n",
        "test_accelerate_launcher.py::test_a_script_that_ignores_the_section_fails",
    ),
    Mutant(
        "launcher: the exit status gets lost",
        "accelerate_commhooks/launcher.py",
        "        return _as_shell(error.returncode)\n",
        "        return 1\n",
        "test_accelerate_launcher.py::test_one_process",
    ),
    Mutant(
        "launcher: the exit status of several gets lost",
        "accelerate_commhooks/launcher.py",
        "        return _as_shell(error.get_first_failure()[1].exitcode)\n",
        "        return 0\n",
        "test_accelerate_launcher.py::test_the_status_of_several_processes",
    ),
    Mutant(
        "launcher: a single process outlives a signal",
        "accelerate_commhooks/launcher.py",
        "    children = psutil.Process().children()\n",
        "    children = []\n",
        "test_accelerate_launcher.py::test_interrupted",
    ),
    Mutant(
        "launcher: temporary files stay after SIGTERM",
        "accelerate_commhooks/launcher.py",
        "    before = signal.signal(signal.SIGTERM, ended)\n",
        "    before = signal.SIG_DFL\n",
        "test_accelerate_launcher.py::test_interrupted",
    ),
    Mutant(
        "launcher: attaching is not noted",
        "accelerate_commhooks/handler.py",
        '            self._handed_over.note("attached")\n',
        "            pass\n",
        "test_accelerate_launcher.py::test_the_workers_use_what_was_handed_over",
    ),
    Mutant(
        "Accelerate demo: checkpoints under their name from the start",
        "examples/accelerate_digits.py",
        '    unfinished = folder / "unfinished"\n',
        '    unfinished = folder / f"epoch_{epoch}"\n',
        "test_accelerate_demo.py::test_a_kill_while_saving_leaves_the_checkpoint_before",
    ),
    Mutant(
        "Accelerate demo: it does not resume",
        "examples/accelerate_digits.py",
        "    if checkpoint is not None:\n",
        "    if False:\n",
        "test_accelerate_demo.py::test_short_demo",
    ),
    Mutant(
        "Accelerate demo: workers outlive the kill",
        "examples/accelerate_demo.py",
        "[launcher, *launcher.children(recursive=True)]",
        "[launcher]",
        "test_accelerate_demo.py::test_workers_in_sessions_of_their_own_are_killed_too",
    ),
    Mutant(
        "a payload of one expanded number is read whole",
        "commhooks/payload_checks.py",
        "    if value.numel() * value.element_size() > value.untyped_storage().nbytes():\n",
        "    if False:\n",
        "test_payload_parts.py::test_parts_that_do_not_belong",
    ),
    Mutant(
        "numbers beyond the parameter's dtype are loaded",
        "commhooks/payload_checks.py",
        "        if _largest(each) * max(1, 1 / loss_scale) > largest / 2**24:\n",
        "        if False:\n",
        "test_hostile_payloads.py::test_changed_payloads",
    ),
    Mutant(
        "a value without a repr breaks the message",
        "commhooks/payload_checks.py",
        "    try:\n        text = repr(value)\n    except Exception:\n",
        "    try:\n        text = repr(value)\n    except ZeroDivisionError:\n",
        "test_hostile_payloads.py::test_changed_payloads",
    ),
    Mutant(
        "a rank's own part is looked at by its rank alone",
        "commhooks/payload_parts.py",
        '            check_tensor(residual, "it")\n',
        "            pass\n",
        "test_hostile_files.py::test_damaged_files_of_accelerate",
    ),
    Mutant(
        "Lightning: checkpoints of the web are run",
        "lightning_commhooks/strategy.py",
        "weights_only=True if weights_only is None else weights_only",
        "weights_only=weights_only",
        "test_hostile_files.py::test_lightning_reads_checkpoints_of_the_web_with_weights_only_too",
    ),
    Mutant(
        "Lightning: the optimizers load before the payload is checked",
        "lightning_commhooks/strategy.py",
        "        hook = self._comm_hook\n        take_over = None\n",
        "        super().load_optimizer_state_dict(checkpoint)\n"
        "        hook = self._comm_hook\n        take_over = None\n",
        "test_hostile_files.py::test_the_optimizers_wait_until_the_payload_has_been_checked",
    ),
    Mutant(
        "YAML takes 4 for True",
        "commhooks/config.py",
        "            wrong = hint is bool and isinstance(value, (int, float)) and not isinstance(value, bool)\n",
        "            wrong = False\n",
        "test_config_channels.py::test_all_channels_accept_and_refuse_the_same",
    ),
    Mutant(
        "Accelerate's options do not arrive",
        "accelerate_commhooks/handler.py",
        "self.comm_state_option or None",
        "None",
        "test_accelerate_stock_script.py::test_case",
    ),
    Mutant(
        "a file of the hook is written in place",
        "accelerate_commhooks/whole_files.py",
        'with _naming(path), open(temporary, "wb") as file:',
        'with _naming(path), open(path, "wb") as file:',
        "test_failed_writes.py::test_files_change_together_or_not_at_all",
    ),
    Mutant(
        "files of the hook change one by one",
        "accelerate_commhooks/whole_files.py",
        "            os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it\n",
        "        os.replace(temporary, path)\n        del self._written[path]\n",
        "test_failed_writes.py::test_files_change_together_or_not_at_all",
    ),
    Mutant(
        "a full disk is told without the file",
        "accelerate_commhooks/whole_files.py",
        "with _naming(path), open(",
        "with open(",
        "test_failed_writes.py::test_the_error_names_the_file",
    ),
    Mutant(
        "torch's error in place of the disk's",
        "accelerate_commhooks/whole_files.py",
        "        raise watched.error from error\n",
        "        raise\n",
        "test_failed_writes.py::test_files_change_together_or_not_at_all",
    ),
    Mutant(
        "temporary files stay",
        "accelerate_commhooks/whole_files.py",
        "                    temporary.unlink(missing_ok=True)\n",
        "                    pass\n",
        "test_failed_writes.py::test_another_error_leaves_the_files_alone",
    ),
    Mutant(
        "a joint save in an exception",
        "lightning_commhooks/checkpoint.py",
        "    return trainer.interrupted or in_signal_handler()\n",
        "    return in_signal_handler()\n",
        "test_interrupted_trainer.py::test_what_ends_a_training_leaves_a_checkpoint_that_resumes",
    ),
    Mutant(
        "a joint save in the requeue signal",
        "lightning_commhooks/checkpoint.py",
        "    return trainer.interrupted or in_signal_handler()\n",
        "    return trainer.interrupted\n",
        "test_interrupted_trainer.py::test_the_requeue_signal_at_different_steps_and_in_mid_backward",
    ),
    Mutant(
        "waiting is codec time",
        "commhooks/stats.py",
        " - (self.last_pass.blocked_s - waited)",
        "",
        "test_metrics.py::test_waiting_is_not_codec_time",
    ),
    Mutant(
        "only the latest pass has waited",
        "commhooks/stats.py",
        "        self.waiting_s_before += self.last_pass.waiting_s\n",
        "",
        "test_metrics.py::test_waiting_is_not_codec_time",
    ),
    Mutant(
        "the simple hooks never wait",
        "commhooks/simple_hooks.py",
        "        this_pass.answered_at = time.perf_counter()\n",
        "",
        "test_metrics.py::test_waiting_is_not_codec_time",
    ),
    Mutant(
        "host times on an accelerator",
        "commhooks/comm_hook.py",
        "timed = known and all(",
        "timed = known or all(",
        "test_metrics.py::test_times_that_nobody_knows_are_none",
    ),
    Mutant(
        "a sample without a copy",
        "commhooks/cosine.py",
        "copy=True)",
        "copy=False)",
        "test_metrics.py::test_the_cosine_is_right_and_leaves_no_trace",
    ),
    Mutant(
        "a sample of this rank alone",
        "commhooks/cosine.py",
        "                dist.all_reduce(each.gradient, group=self._group)\n",
        "                pass\n",
        "test_metrics.py::test_the_cosine_is_right_and_leaves_no_trace",
    ),
    Mutant(
        "another pass is sampled",
        "commhooks/cosine.py",
        "self._passes % self.every == 0",
        "self._passes % self.every == 1",
        "test_metrics.py::test_the_cosine_is_right_and_leaves_no_trace",
    ),
    Mutant(
        "ranks sample as each likes",
        "commhooks/cosine.py",
        "        if len(set(numbers)) > 1:\n",
        "        if False:\n",
        "test_metrics.py::test_wrong_sampling",
    ),
    Mutant(
        "residuals are told with the loss scale",
        "commhooks/norms.py",
        "values[residual] / loss_scale",
        "values[residual]",
        "test_metrics.py::test_norms",
    ),
    Mutant(
        "means since the beginning",
        "commhooks/metrics.py",
        "unit * (now[of] - (before.get(of) or 0)) / passes",
        "unit * now[of] / passes",
        "test_metrics.py::test_a_meter_tells_what_happened_since_the_last_reading",
    ),
    Mutant(
        "an old sample is logged again",
        "commhooks/metrics.py",
        ' and now["cosine_pass"] != before.get("cosine_pass")',
        "",
        "test_metrics.py::test_a_meter_tells_what_happened_since_the_last_reading",
    ),
    Mutant(
        "statistics are logged under the next step",
        "commhooks/registration.py",
        "                flight.step,\n",
        "                self.memory.step,\n",
        "test_metrics.py::test_compression_statistics_are_logged_as_torch_logs_them",
    ),
    Mutant(
        "the monitor logs one step late",
        "lightning_commhooks/monitor.py",
        "(step + 1) % every",
        "step % every",
        "test_monitor.py::test_once_every_n_steps",
    ),
    Mutant(
        "the monitor logs for every optimizer",
        "lightning_commhooks/monitor.py",
        " or step == self._last_step",
        "",
        "test_monitor.py::test_once_every_n_steps",
    ),
    Mutant(
        "the monitor acts on all ranks",
        "lightning_commhooks/monitor.py",
        " or not trainer.is_global_zero",
        "",
        "test_monitor.py::test_the_progress_bar_shows_one_value",
    ),
    Mutant(
        "the monitor keeps counting from the last fit",
        "lightning_commhooks/monitor.py",
        "        self._meter, self._last_step = Meter(), -1\n        hook",
        "        hook",
        "test_monitor.py::test_once_every_n_steps",
    ),
    Mutant(
        "the monitor knows one logger",
        "lightning_commhooks/monitor.py",
        "in trainer.loggers:",
        "in trainer.loggers[:1]:",
        "test_monitor.py::test_both_loggers_hold_all_values",
    ),
    Mutant(
        "two models under one name",
        "accelerate_commhooks/handler.py",
        'prefix=f"{PREFIX}/{number}" if number else PREFIX',
        "prefix=PREFIX",
        "test_accelerate_log.py::test_each_model_has_values_of_its_own",
    ),
    Mutant(
        "a meter for each call of log",
        "accelerate_commhooks/handler.py",
        "self._meters.setdefault(hook, Meter())",
        "Meter()",
        "test_accelerate_log.py::test_values_reach_the_trackers",
    ),
    Mutant(
        "the doctor leaves the random state moved",
        "commhooks/doctor_run.py",
        "    finally:\n        random_state.restore()\n",
        "    finally:\n",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor measures the model itself",
        "commhooks/doctor_copies.py",
        "copy.deepcopy(ddp_model.module)",
        "ddp_model.module",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor keeps its copies",
        "commhooks/doctor_measure.py",
        "gc.collect(generation)",
        "pass",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor's candidates never change places",
        "commhooks/doctor_measure.py",
        "first = turn * len(order) // rounds",
        "first = 0 * turn",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "printing the doctor's report draws a random number",
        "commhooks/doctor_report.py",
        "            random.setstate(state)\n",
        "            pass\n",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "each rank believes its own clock",
        "commhooks/doctor_measure.py",
        "measured.step_ms.append(1000 * max(step))",
        "measured.step_ms.append(1000 * passed)",
        "test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "a slow rank's delay is taken for the network",
        "commhooks/doctor_measure.py",
        "1000 * min(waiting)",
        "1000 * max(waiting)",
        "test_doctor.py::test_the_slowest_rank_decides_and_options",
    ),
    Mutant(
        "a candidate of the doctor never ends",
        "commhooks/doctor_measure.py",
        "            if measured.spent_s >= self._seconds:\n                break\n",
        "",
        "test_doctor.py::test_the_slowest_rank_decides_and_options",
    ),
    Mutant(
        "the doctor's copies have other buckets",
        "commhooks/doctor_copies.py",
        '            options["bucket_cap_mb"] = ddp_model.bucket_bytes_cap / 2**20\n',
        "            pass\n",
        "test_doctor.py::test_copies_are_wrapped_as_the_model_is",
    ),
    Mutant(
        "the doctor advises where there is nothing to win",
        "commhooks/doctor_judge.py",
        "    if headroom < WORTH:\n",
        "    if headroom < 0:\n",
        "test_doctor.py::test_advice",
    ),
    Mutant(
        "the doctor advises what may be chance",
        "commhooks/doctor_judge.py",
        " and each.quartiles_ms[1] < plain.quartiles_ms[0]",
        "",
        "test_doctor.py::test_advice",
    ),
    Mutant(
        "the doctor prefers the fastest to the exact",
        "commhooks/doctor_judge.py",
        "each.median_ms <= ABOUT_AS_FAST * fastest",
        "each.median_ms <= fastest",
        "test_doctor.py::test_advice",
    ),
    Mutant(
        "the doctor takes chance for the network on a slower link",
        "commhooks/doctor_judge.py",
        "return measured.median_ms + (times_slower - 1) * here_ms",
        "return measured.median_ms + (times_slower - 1) * max(here_ms, measured.median_ms - noop.median_ms)",
        "test_doctor.py::test_noise_does_not_let_more_bytes_win_on_a_slow_link",
    ),
    Mutant(
        "the doctor runs a batch_fn that calls your own model",
        "commhooks/doctor_check.py",
        '        raise DoctorError(f"batch_fn called your own model',
        '        return\n        raise DoctorError(f"batch_fn called your own model',
        "test_doctor.py::test_a_batch_fn_that_does_not_work",
    ),
    Mutant(
        "one rank's broken batch_fn is not told to the others",
        "commhooks/doctor_check.py",
        "    if not any(failed):\n        return\n",
        "    if problem is None:\n        return\n",
        "test_doctor.py::test_where_it_fails_on_one_rank_all_of_them_end",
    ),
    Mutant(
        "exclude: case does not matter",
        "commhooks/exclude.py",
        "fnmatch.fnmatchcase(name, pattern)",
        "fnmatch.fnmatchcase(name.lower(), pattern.lower())",
        "test_exclude.py::test_globs",
    ),
    Mutant(
        "exclude: what is excluded is compressed all the same",
        "commhooks/registration.py",
        "excluded_by=self.names.excluded_by(name, self.options.exclude)",
        "excluded_by=None",
        "test_exclude.py::test_what_is_excluded_is_averaged_exactly",
    ),
    Mutant(
        "exclude: the ranks do not compare it",
        "commhooks/request_check.py",
        "isinstance(v, plain) or (type(v) is list and all(isinstance(item, plain) for item in v))",
        "isinstance(v, plain)",
        "test_exclude.py::test_ranks_must_exclude_the_same_and_rank_0_warns",
    ),
    Mutant(
        "exclude: only the first name of a tied parameter counts",
        "commhooks/names.py",
        "list(all_names.get(id(p), [name]))",
        "[name]",
        "test_exclude.py::test_the_second_name_of_a_tied_parameter_excludes_it",
    ),
    Mutant(
        "exclude: a bare registration ignores it",
        "commhooks/names.py",
        "        if patterns:\n            raise HookRunError(",
        "        if False:\n            raise HookRunError(",
        "test_exclude.py::test_a_bare_registration_has_no_names",
    ),
    Mutant(
        "exclude: YAML makes text of what is in the list",
        "commhooks/config.py",
        "            if not _is_list_of_text(value):\n                raise",
        "            if not isinstance(value, list):\n                raise",
        "test_config_errors.py::test_python_and_yaml_refuse_the_same_values",
    ),
    Mutant(
        "plan: the first bucket has no cap of its own",
        "commhooks/bucket_estimate.py",
        "    if bucket_cap_mb is None:\n",
        "    if False:\n",
        "test_plan_model.py::test_buckets_are_those_of_ddp_after_the_first_step",
    ),
    Mutant(
        "plan: the learned P of alternate is forgotten in the memory",
        "commhooks/plan.py",
        "kept = p.rank * (p.n + p.m if p.alternate else p.m)",
        "kept = p.rank * p.m",
        "test_plan_model.py::test_the_memory_that_is_planned_is_taken",
    ),
    Mutant(
        "plan: noop sends",
        "commhooks/plan_model.py",
        "sends=config.sends",
        "sends=True",
        "test_plan_model.py::test_the_same_as_the_attached_hook",
    ),
    Mutant(
        "plan: the break-even leaves the ring out",
        "commhooks/plan.py",
        "return saved * ring_factor(world_size) * 8",
        "return saved * 8",
        "test_plan_model.py::test_the_break_even_is_where_both_are_as_fast",
    ),
    Mutant(
        "plan and inspect run what a file says",
        "commhooks/named_model.py",
        "weights_only=True, mmap=lazily",
        "weights_only=False, mmap=lazily",
        "test_inspect.py::test_nothing_in_a_file_is_executed",
    ),
    Mutant(
        "inspect: damage ends well",
        "commhooks/inspect_command.py",
        "return 1 if any(",
        "return 0 if any(",
        "test_inspect.py::test_damage_is_named",
    ),
    Mutant(
        "inspect: a missing part is not told",
        "commhooks/inspect_payload.py",
        "if rank not in parts]",
        "if rank < 0]",
        "test_inspect.py::test_parts_that_are_missing_or_of_another_save",
    ),
    Mutant(
        "inspect: control characters reach the terminal",
        "commhooks/named_model.py",
        "return text if text.isprintable() else repr(text)",
        "return text",
        "test_inspect.py::test_what_a_stranger_named_cannot_steer_the_terminal",
    ),
]


def run(mutant: Mutant, console: Console) -> str:
    """ "killed", "SURVIVED", or what went wrong."""
    before = run_test(mutant.test)
    if before.outcome != "passed":
        console.print(before.output[-1500:], markup=False)
        return f"NO TEST: without the fault it {before.outcome}"
    after = run_test(mutant.test, mutant)
    if after.outcome != "failed":
        console.print(after.output[-1500:], markup=False)
    return {"passed": "SURVIVED", "failed": "killed"}.get(after.outcome, after.outcome)


@dataclass(frozen=True)
class Outcome:
    outcome: str
    output: str = ""


@functools.cache  # without a fault, a test is run once for all the mutants that name it
def run_test(test: str, mutant: Mutant | None = None) -> Outcome:
    """ "passed", "failed" or what went wrong, in a copy of the packages with the fault of `mutant`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder)
        if mutant is not None:
            file = Path(folder, mutant.file)
            text = file.read_text()
            if text.count(mutant.old) != 1:
                return Outcome(f"STALE: the text to replace occurs {text.count(mutant.old)} times")
            file.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Outcome("TIMED OUT")
    # pytest: 0 all passed, 1 some failed; anything else means that the test did not run at all.
    outcome = {0: "passed", 1: "failed"}.get(done.returncode, f"NOT RUN (pytest exit {done.returncode})")
    return Outcome(outcome, done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    words = parser.parse_args().names
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    console = Console()
    table = Table("mutant", "test that must fail", "outcome", "s")
    failures = 0
    for number, mutant in enumerate(chosen, 1):
        console.print(f"{number}/{len(chosen)} {mutant.name} ...", markup=False)
        started = time.monotonic()
        outcome = run(mutant, console)
        failures += outcome != "killed"
        table.add_row(mutant.name, mutant.test, outcome, f"{time.monotonic() - started:.0f}")
    console.print(table)
    console.print(f"{len(chosen) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
