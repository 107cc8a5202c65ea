"""What `mutation.py` changes, the tests that must notice, and the mutants that none can notice."""

from dataclasses import dataclass

from tests.support.repository import sources

# What cosmic-ray may do, one change for each: of its 132 ways to replace an operator by another,
# most end in the same TypeError. Left out are `|`, which here joins types and dicts, and the
# removal of decorators (dataclass, property, no_grad), which ends in an import error or only costs
# memory.
OPERATORS = [
    f"core/{name}"
    for name in (
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceBinaryOperator_Sub_Add",
        "ReplaceBinaryOperator_Mul_Add",
        "ReplaceBinaryOperator_Div_Mul",
        "ReplaceBinaryOperator_FloorDiv_Mul",
        "ReplaceBinaryOperator_Mod_FloorDiv",
        "ReplaceBinaryOperator_BitAnd_BitOr",
        "ReplaceBinaryOperator_RShift_LShift",
        "ReplaceComparisonOperator_Eq_NotEq",
        "ReplaceComparisonOperator_NotEq_Eq",
        "ReplaceComparisonOperator_Lt_LtE",
        "ReplaceComparisonOperator_LtE_Lt",
        "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_GtE_Gt",
        "ReplaceComparisonOperator_Is_IsNot",
        "ReplaceComparisonOperator_IsNot_Is",
        "ReplaceUnaryOperator_USub_UAdd",
        "ReplaceUnaryOperator_Delete_Not",
        "ReplaceUnaryOperator_Delete_Invert",
        "AddNot",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        "ExceptionReplacer",
        "NumberReplacer",
        "ZeroIterationForLoop",
    )
]


@dataclass(frozen=True)
class Part:
    """Some files of an area, and the tests that must notice, the quickest of them first."""

    files: str
    """Names of modules, or `*` for those that no part before it has."""
    tests: tuple[str, ...]


FOLDERS = {
    "engine": "commhooks/engine",
    "checkpoint": "commhooks/checkpoint",
    "quantized": "commhooks/compressors/quantized",
    "powersgd": "commhooks/compressors/powersgd",
    "local_steps": "commhooks/local_steps",
    "sharded": "commhooks/sharded",
}
"""The folder of each area."""

AREAS = {
    "engine": [
        Part(
            "reduction",
            (
                "engine/test_which_nodes",
                "engine/test_hierarchy::test_the_plan_shows_what_a_rank_of_a_node_needs",
                "engine/test_hierarchy::test_results_are_those_without_nodes",
                "engine/test_hierarchy::test_norms_are_those_of_the_share",
                "engine/test_hierarchy::test_one_file_with_the_residuals_of_all_ranks_resumes",
                "engine/test_hierarchy::test_resume_is_bit_equal",
                "engine/test_casts_between_nodes",
            ),
        ),
        Part(
            "consensus kernel_choice",
            (
                "engine/test_kernel_choice",
                "engine/test_start_step",
                "engine/test_disagreement",
                "compressors/test_different_sends::test_the_send_is_named_on_all_ranks",
                "compressors/native/test_choice",
                "auto/test_auto_training::test_ranks_with_different_decisions_say_so",
                "auto/test_auto_training::test_times_that_make_no_sense_on_one_rank_leave_all_with_all_reduce",
                "ddp_comm_hooks/test_dropin::test_torchs_example_of_saving_and_reloading_runs",
            ),
        ),
        Part(
            "streams",
            ("engine/test_streams", "hook/test_metrics"),
        ),
        Part(
            "*",
            (
                "engine/test_backward_pass",
                "engine/test_immediate",
                "engine/test_masked_commit",
                "engine/test_settle",
                "compressors/test_author_errors",
                "engine/test_abandoned_backward",
                "engine/test_start_step",
                "engine/test_abandoned_collectives",
                "checkpoint/test_inexact::test_the_commits_after_a_failed_one_can_be_saved_and_resumed_exactly",
                "checkpoint/test_inexact::test_no_rank_waits_for_a_rank_whose_commit_failed",
                "engine/test_ddp_modes",
                "compressors/powersgd/test_batched",
                "gradients/test_loss_scale",
                "compressors/test_every_compressor",
            ),
        ),
    ],
    "checkpoint": [
        Part(
            "learned_state writing reading residuals distributed",
            (
                "checkpoint/test_compressor_fields",
                "checkpoint/test_hostile_payloads",
                "checkpoint/test_golden",
                "checkpoint/test_inexact",
                "checkpoint/test_change",
                "checkpoint/test_resume",
                "checkpoint/test_distributed::test_a_resumed_run_is_bit_equal",
                "engine/test_hierarchy::test_one_file_with_the_residuals_of_all_ranks_resumes",
                "engine/test_hierarchy::test_resume_is_bit_equal",
            ),
        ),
        Part(
            "user_state",
            (
                "checkpoint/test_files::test_plain_types_are_accepted_as_torch_accepts_them",
                "checkpoint/test_files::test_the_first_value_that_torch_would_reject_is_named",
                "checkpoint/test_files::test_a_value_that_contains_itself_is_named",
                "checkpoint/test_change::test_a_users_state_that_cannot_be_loaded_is_reported",
                "hook/test_no_hook",
                "hook/test_user_hooks",
            ),
        ),
        Part(
            "*",
            (
                "checkpoint/test_files",
                "checkpoint/test_compressor_fields",
                "checkpoint/test_hostile_payloads",
                "checkpoint/test_golden",
                "checkpoint/test_change",
            ),
        ),
    ],
    "quantized": [
        Part(
            "*",
            (
                "compressors/quantized/test_blocks",
                "compressors/quantized/test_quantized_against_oracle",
                "engine/test_kernel_choice::test_different_machines_are_warned_about",
                "compressors/quantized/test_native_bits",
                "hook/test_plan",
                "compressors/quantized/test_quantized_cases",
            ),
        )
    ],
    "powersgd": [
        Part(
            "*",
            (
                "compressors/powersgd/test_fields",
                "compressors/powersgd/test_accelerator_factors",
                "compressors/powersgd/test_cpu",
                "compressors/native/test_threads",
                "compressors/powersgd/test_batched",
                "compressors/powersgd/test_powersgd_against_oracle",
                "compressors/powersgd/test_accelerator",
            ),
        )
    ],
    "local_steps": [
        Part("schedule", ("local_steps/test_schedule", "local_steps/test_rounds")),
        Part(
            "events common_state common_weights saving",
            (
                "local_steps/test_common_state",
                "local_steps/test_mishaps",
                "local_steps/test_rounds",
            ),
        ),
        Part(
            "*",
            (
                "local_steps/test_outer_steps",
                "local_steps/test_offload",
                "local_steps/test_rounds",
                "local_steps/test_saving",
                "local_steps/test_mishaps",
                "local_steps/test_local_nodes",
                "local_steps/test_fully_shard_rounds",
            ),
        ),
    ],
    "sharded": [
        Part(
            "codec blocks parts layout memory routes",
            (
                "sharded/test_shards_codec",
                "sharded/test_shards_nodes",
                "sharded/test_shards_modes",
                "sharded/test_shards",
            ),
        ),
        Part("options", ("sharded/test_shards_refusals", "sharded/test_shards_modes")),
        Part(
            "*",
            (
                "sharded/test_shards_modes",
                "sharded/test_shards_plan",
                "sharded/test_shards_refusals",
                "sharded/test_shards_streams",
                "sharded/test_shards",
            ),
        ),
    ],
}
"""More than a part where other tests notice other files. Tests as `folder/file` or
`folder/file::function`.
"""


EXPLAINED = {
    (
        "commhooks/compressors/quantized/mean.py",
        "return largest / self.levels * (1 - 4 * torch.finfo(dtype).eps)",
        "return largest / self.levels * (1 - 5 * torch.finfo(dtype).eps)",
    ): "any few eps leave room for rounding",
    (
        "commhooks/local_steps/workspaces.py",
        "if len(self._fragments) == 1:",
        "if len(self._fragments) == 0:",
    ): "the buffers of the only fragment are kept; made anew they are the same",
    (
        "commhooks/checkpoint/payload.py",
        "if _largest(residual) * max(1, 1 / loss_scale) > largest / 2**24:",
        "if _largest(residual) * max(1, 1 / loss_scale) > largest / 2** 25:",
    ): "any limit does that leaves room for the sum of a row",
    (
        "commhooks/checkpoint/parts.py",
        'name: entry["residual"][0]',
        'name: entry["residual"][ -1]',
    ): "the list holds the residual of one rank",
    (
        "commhooks/checkpoint/distributed.py",
        'return entries[0] | {"shape": [rows, *shapes[0][1:]] if shapes[0] else []}',
        'return entries[ 1] | {"shape": [rows, *shapes[0][1:]] if shapes[0] else []}',
    ): "it is for an error, of which the shape alone is read",
    (
        "commhooks/engine/session.py",
        "self._statistics_due = 0",
        "self._statistics_due = -1",
    ): "no step is less than 0",
    (
        "commhooks/compressors/quantized/kernels.py",
        "divisors = scales.masked_fill(scales == 0, 1).unsqueeze(-1)",
        "divisors = scales.masked_fill(scales == 0, 2).unsqueeze(-1)",
    ): "where the scale is 0, the numbers are so small that either quotient rounds to 0",
    (
        "commhooks/compressors/quantized/kernels.py",
        "self._factor = 1.0",
        "self._factor = 0.0",
    ): "`load` sets it before it is read",
    (
        "commhooks/compressors/quantized/kernels.py",
        "sent.scales.copy_(self.scales.index_select(0, order).view_as(sent.scales))",
        "sent.scales.copy_(self.scales.index_select( -1, order).view_as(sent.scales))",
    ): "a 1-D tensor",
    (
        "commhooks/compressors/quantized/kernels.py",
        "first, end = counts.index_select(0, self._first_and_end).view(2, -1)",
        "first, end = counts.index_select( -1, self._first_and_end).view(2, -1)",
    ): "a 1-D tensor",
    (
        "commhooks/compressors/powersgd/accelerator.py",
        "@dataclass(frozen=True, eq=False)",
        "@dataclass(frozen=False, eq=False)",
    ): "nothing assigns to a field",
    (
        "commhooks/compressors/powersgd/batched.py",
        "self._size = work.matrices[0].n * work.matrices[0].m",
        "self._size = work.matrices[ -1].n * work.matrices[0].m",
    ): "a whole bucket is one matrix",
    (
        "commhooks/compressors/powersgd/batched.py",
        "gradient = bucket.deltas[0].view(-1)[slot.offset : slot.stop]",
        "gradient = bucket.deltas[ -1].view(-1)[slot.offset : slot.stop]",
    ): "a whole bucket is one matrix",
    (
        "commhooks/compressors/powersgd/accelerator.py",
        "padded = (len(groups[-1]) + 1) * length if groups else 0",
        "padded = (len(groups[-1]) + 1) * length if groups else -1",
    ): "without groups it is not read",
    (
        "commhooks/engine/session.py",
        "flat = self._pass.running[-1].flat",
        "flat = self._pass.running[- 0].flat",
    ): "only its device is read, and all are on one",
}
"""(file, line, what the mutant makes of it): why no test can notice, or need not."""

EXPLAINED_NUMBERS = {
    (
        "commhooks/compressors/quantized/kernels.py",
        "results_of",
    ): "any fixed numbers tell builds apart",
    ("commhooks/compressors/powersgd/cpu.py", "results_of"): "any fixed numbers tell builds apart",
}
"""(file, function): why another number in it need not be noticed."""


def stale() -> list[tuple[str, ...]]:
    """The entries of EXPLAINED whose code has gone."""
    lines = {file: set(map(str.strip, text.splitlines())) for file, text in sources().items()}
    gone: list[tuple[str, ...]] = [
        entry for entry in EXPLAINED if entry[1] not in lines.get(entry[0], ())
    ]
    return gone + [
        (file, function)
        for file, function in EXPLAINED_NUMBERS
        if not any(line.startswith(f"def {function}(") for line in lines.get(file, ()))
    ]
