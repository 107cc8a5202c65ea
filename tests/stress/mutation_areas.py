"""What `mutation.py` changes, which tests are to notice, and the mutants that none can notice, each with the reason."""

from dataclasses import dataclass

# What cosmic-ray may do, one change for each: of its 132 ways to replace an operator by another, most end in the same
# TypeError. Left out are `|`, which here joins types and dicts, and the removal of decorators (dataclass, property,
# no_grad), which ends in an import error or only costs memory.
OPERATORS = [
    f"core/{name}"
    for name in (
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceBinaryOperator_Sub_Add",
        "ReplaceBinaryOperator_Mul_Div",
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
    """Some files of an area, and the tests that are to notice: those that notice most in the least time come first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


def _files(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"commhooks/{package}/{name}.py" for name in names)


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name.replace('::', '.py::') if '::' in name else name + '.py'}" for name in names)


AREAS = {
    "engine": [
        Part(
            _files("engine", "average", "backward_pass", "held_state", "immediate", "known_buckets")
            + _files("engine", "orphaned_residuals", "session", "session_state", "simulation", "state", "task"),
            _tests(
                "engine/test_backward_pass",
                "engine/test_meanwhile",
                "engine/test_settle",
                "engine/test_simulation",
                "engine/test_immediate",
                "engine/test_masked_commit",
                "engine/test_abandoned_collectives",
                "engine/test_abandoned_backward",
                "engine/test_start_step",
                "compressors/auto/test_orphaned_residuals",
                "engine/test_nonfinite",
                "engine/test_ddp_modes",
            ),
        ),
        Part(
            _files("engine", "arrangement", "hierarchy", "node_shares"),
            _tests("engine/test_which_nodes", "engine/test_casts_between_nodes", "engine/test_hierarchy"),
        ),
        Part(
            _files("engine", "consensus", "kernel_choice"),
            _tests(
                "engine/test_kernel_choice",
                "engine/test_disagreement",
                "engine/test_start_step",
                "compressors/powersgd/test_native_kernel",
            ),
        ),
        Part(
            _files("engine", "local_driver", "observer", "statistics_log", "streams"),
            _tests("engine/test_observer", "engine/test_streams", "tools/test_codec_time", "hook/test_metrics"),
        ),
    ],
    "checkpoint": [
        Part(
            _files("checkpoint", "checks", "parts", "payload", "reshard"),
            _tests(
                "checkpoint/test_payload_parts",
                "checkpoint/test_plain_types",
                "checkpoint/test_further_fields",
                "checkpoint/test_hostile_payloads",
                "checkpoint/test_payload",
                "checkpoint/test_golden_payloads",
                "checkpoint/test_changed_setup",
            ),
        ),
        Part(
            _files("checkpoint", "learned_state", "distributed", "user_state"),
            _tests("checkpoint/test_further_fields", "checkpoint/test_payload", "checkpoint/test_changed_surroundings"),
        ),
        Part(_files("checkpoint", "cut_off"), _tests("checkpoint/test_hostile_files")),
    ],
    "quantized": [
        Part(
            _files("compressors/quantized", "block_plan", "blocks", "compressor", "exchange", "mean", "messages")
            + _files("compressors/quantized", "native_blocks", "native_kernel", "options", "shares", "torch_kernel"),
            _tests(
                "compressors/quantized/test_shares",
                "compressors/quantized/test_blocks",
                "compressors/quantized/test_quantized_against_oracle",
                "compressors/quantized/test_native_blocks",
                "hook/test_plan",
                "compressors/quantized/test_quantized_cases",
            ),
        )
    ],
    "powersgd": [
        Part(
            _files("compressors/powersgd", "codec", "device_kernel", "exchange", "message", "matrix_plan")
            + _files("compressors/powersgd", "compressor", "fields", "host_kernel", "native_products", "options")
            + _files("compressors/powersgd", "packed_factors", "torch_products", "workspace")
            + _files("compressors/powersgd", "quantised_message", "quantised_plan", "reference"),
            _tests(
                "compressors/powersgd/test_codec",
                "compressors/powersgd/test_packed_factors",
                "compressors/powersgd/test_powersgd_against_oracle",
                "compressors/powersgd/test_masked_exchange",
                "compressors/powersgd/test_quantised_factors",
                "compressors/powersgd/test_batched_rank",
                "compressors/powersgd/test_native_threads",
            ),
        )
    ],
}
"""Areas by name; more than a part where other tests notice other files."""

EXPLAINED: dict[tuple[str, str, str], str] = {}
"""(file, line, what the mutant makes of it): why no test can notice, or need not."""
