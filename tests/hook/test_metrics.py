"""Seconds of the codec and of waiting, norms, and the metrics that loggers get."""

import inspect
import logging
import math
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import commhooks
from commhooks.gradients import precision
from commhooks.hook.meter import LATEST, NAMES, Meter
from tests.support.ddp_steps import (
    backward,
    descend,
    gradients,
    log_lines,
    mlp,
    train,
    wrap,
)
from tests.support.inside import session_of

DELAY_S = 2.0  # far more than a step takes on a busy machine
POWERSGD: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
KINDS: dict[str, dict[str, Any]] = {
    "powerSGD": {"hook": "powerSGD", "hook_options": POWERSGD},
    "powerSGD on bf16": {"hook": "powerSGD", "hook_options": POWERSGD, "wrapper": "bf16"},
    "batched": {"hook": "batched_powerSGD", "hook_options": POWERSGD},
    "allreduce": {"hook": "allreduce"},
    "bf16 wrapper": {"hook": "allreduce", "wrapper": "bf16"},
}


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


# ---- time ----------------------------------------------------------------------------------------


LATE = ("powerSGD on bf16", "bf16 wrapper")


def waiting_for_a_late_rank() -> dict[str, Any]:
    """Rank 1 comes late to the last of four backward passes."""
    out = {}
    for kind in LATE:
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, **KINDS[kind])
        before = {"codec_s": 0.0, "waiting_s": 0.0}
        sums_agree = True
        for step in range(4):
            dist.barrier()
            if step == 3 and dist.get_rank() == 1:
                time.sleep(DELAY_S)
            began = time.perf_counter()
            backward(ddp, step)
            wall = time.perf_counter() - began
            stats = hook.stats()
            for name, value in before.items():
                sums_agree &= math.isclose(
                    stats[name] - value, stats[f"{name}_last_pass"], abs_tol=1e-9
                )
            before = {name: stats[name] for name in before}
        out[kind] = {**stats, "wall": wall, "sums agree": sums_agree}
    return out


def test_waiting_is_not_codec_time(run_ranks):
    ranks = run_ranks(waiting_for_a_late_rank)
    for kind in LATE:
        early, late = ranks[0][kind], ranks[1][kind]
        assert early["sums agree"] and late["sums agree"], kind
        for stats in (early, late):
            assert 0 < stats["codec_s_last_pass"] and 0 <= stats["waiting_s_last_pass"], kind
            assert stats["codec_s_last_pass"] + stats["waiting_s_last_pass"] <= stats["wall"], kind
        assert early["waiting_s_last_pass"] > 0.6 * DELAY_S, kind
        assert (
            early["codec_s_last_pass"] < 0.6 * DELAY_S
            and late["waiting_s_last_pass"] < 0.6 * DELAY_S
        ), kind
        if "SGD" in kind:
            assert early["compressed_steps"] == 3


NOTHING: dict[
    str, dict[str, Any]
] = {  # hooks that have begun and find no parameter that is worth compressing
    "powerSGD": {"hook_options": POWERSGD | {"min_compression_rate": 1000}},
    "batched_powerSGD": {"hook_options": POWERSGD | {"matrix_approximation_rank": 1000}},
    "int8": {"hook_options": {"start_iter": 1, "exclude": ["*"]}},
    "examples.random_k:RandomKCompressor": {"hook_options": {"start_iter": 1, "exclude": ["*"]}},
}


def nothing_compressed() -> list[dict[str, Any]]:
    results = []
    for hook, arguments in NOTHING.items():
        ddp = wrap(mlp())
        attached = commhooks.attach(ddp, hook, **arguments)
        train(ddp, 4)
        results.append(attached.stats() | {"exact": attached.state_dict("mean")["exact"]})
    return results


def test_a_hook_that_compresses_no_parameter_counts_no_compressed_step(run_ranks):
    for rank in run_ranks(nothing_compressed):
        for stats in rank:
            assert stats["compressed_steps"] == stats["so_far"]["compressed_steps"] == 0, stats[
                "hook"
            ]
            assert stats["step"] == 4 and stats["nonfinite_steps"] == 0 and stats["exact"]
            assert stats["compression_rate"] == pytest.approx(1, abs=0.01)


def times_that_nobody_knows() -> list[dict[str, Any]]:
    of_a_user, on_an_accelerator = wrap(mlp()), wrap(mlp())
    hooks = [
        commhooks.attach(of_a_user, users_hook),
        commhooks.attach(on_an_accelerator, "powerSGD"),
    ]
    train(of_a_user, 2)
    train(on_an_accelerator, 2)
    with mock.patch.object(precision, "is_host_readable", return_value=False):
        return [hook.stats() for hook in hooks] + [Meter().read(hook) for hook in hooks]


def test_times_that_nobody_knows_are_none(run_ranks):
    for *stats, of_a_user, on_an_accelerator in run_ranks(times_that_nobody_knows):
        for row in stats:
            assert [row[name] for name in row if "codec" in name or "waiting" in name] == [None] * 4
        assert of_a_user.keys() == {"commhooks/gradient_norm"}
        # No residual either: compression has not begun.
        unknown = (
            "codec_ms",
            "waiting_ms",
            *LATEST,
            "residual_norm",
            "residual_over_gradient",
        )
        missing = {f"commhooks/{name}" for name in unknown}
        assert on_an_accelerator.keys() == {f"commhooks/{name}" for name in NAMES} - missing


# ---- norms ---------------------------------------------------------------------------------------


def norms() -> dict[str, Any]:
    out: dict[str, Any] = {}
    scale = 1.0
    for kind in ("powerSGD", "batched", "allreduce"):
        scale = 8.0 if kind == "powerSGD" else 1.0
        ddp = wrap(mlp())
        more = {"loss_scale": lambda scale=scale: scale} if kind != "allreduce" else {}
        hook = commhooks.attach(ddp, **KINDS[kind], **more)
        out[kind, "before"] = hook.norms()
        for step in range(3):
            backward(ddp, step)
            descend(ddp)
        saved = hook.state_dict("per_rank")
        parameters = saved.get("parameters", {})
        residuals = {
            name: float(entry["residual"][0].double().norm()) / scale
            for name, entry in parameters.items()
            if entry.get("residual") is not None
        }
        norms = {name: float(g.double().norm()) for name, g in gradients(ddp).items()}
        if kind == "batched":
            residuals = {
                n: float(r.double().norm()) for n, r in session_of(hook).state["residual"].items()
            }
        out[kind] = {"norms": hook.norms(), "residuals": residuals, "gradients": norms}
        ddp.zero_grad(set_to_none=True)
        out[kind, "after zero_grad"] = hook.norms()
    return out


def test_norms_are_those_of_gradient_and_residual(run_ranks):
    ranks = run_ranks(norms)
    # each rank has its own
    assert ranks[0]["powerSGD"]["residuals"] != ranks[1]["powerSGD"]["residuals"]
    for rank in ranks:
        for kind, matrices in (("powerSGD", 3), ("batched", 6), ("allreduce", 0)):
            truth, before, after = rank[kind], rank[kind, "before"], rank[kind, "after zero_grad"]
            compressed = set(truth["residuals"]) or set(truth["gradients"])
            residual = math.hypot(*truth["residuals"].values()) if matrices else None
            gradient = math.hypot(*(truth["gradients"][name] for name in compressed))
            assert len(truth["residuals"]) == matrices
            ratio = residual / gradient if matrices else None
            wanted = {
                "residual_norm": residual,
                "gradient_norm": gradient,
                "residual_over_gradient": ratio,
            }
            assert truth["norms"] == {
                name: value and pytest.approx(value, rel=1e-5) for name, value in wanted.items()
            }
            assert before == dict.fromkeys(wanted)
            assert after == {
                **dict.fromkeys(wanted),
                "residual_norm": truth["norms"]["residual_norm"],
            }


# ---- meter ---------------------------------------------------------------------------------------


def readings() -> list[Any]:
    ddp = wrap(mlp())
    hook = commhooks.attach(ddp, "powerSGD", hook_options=POWERSGD | {"start_powerSGD_iter": 2})
    meter = Meter()
    out = []
    train(ddp, 2)
    out.append((meter.read(hook), hook.stats()))
    train(ddp, 3, first_step=2)
    out.append((meter.read(hook, prefix="x"), hook.stats()))
    out.append((meter.read(hook), hook.stats()))
    return out


def test_a_meter_counts_from_the_last_reading(run_ranks):
    for (first, one), (second, two), (third, _) in run_ranks(readings):
        names = {f"commhooks/{name}" for name in NAMES} - {f"commhooks/{name}" for name in LATEST}
        # No residual yet.
        assert first.keys() == names - {
            f"commhooks/{n}" for n in ("residual_norm", "residual_over_gradient")
        }
        assert first["commhooks/compression_rate"] == 1 and first["commhooks/compressed_steps"] == 0
        assert first["commhooks/bytes_per_pass"] == one["bytes_sent"] / 2
        assert {name.replace("x/", "commhooks/") for name in second} == names
        assert second["x/compressed_steps"] == 3 and second["x/bytes_sent"] == two["bytes_sent"]
        assert second["x/bytes_per_pass"] == (two["bytes_sent"] - one["bytes_sent"]) / 3
        assert second["x/bytes_per_pass"] < 0.5 * first["commhooks/bytes_per_pass"]
        saved = two["bytes_uncompressed"] - one["bytes_uncompressed"]
        assert second["x/compression_rate"] == saved / (two["bytes_sent"] - one["bytes_sent"])
        for name in ("codec", "waiting"):
            since = two[f"{name}_s"] - one[f"{name}_s"]
            assert second[f"x/{name}_ms"] == pytest.approx(1000 * since / 3)
        # Nothing has happened since: no means.
        means = {
            f"commhooks/{n}"
            for n in ("bytes_per_pass", "codec_ms", "waiting_ms", "compression_rate")
        }
        assert third.keys() == names - means


# ---- torch's own log lines -----------------------------------------------------------------------


def reports(module: Any, logger: str) -> list[str]:
    ddp = wrap(mlp(), bucket_cap_mb=25)  # torch's hook hangs on gloo with more than one bucket
    state = module.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=3,
        compression_stats_logging_frequency=2,
    )
    ddp.register_comm_hook(state, module.powerSGD_hook)
    with log_lines(logger, logging.INFO) as lines:
        train(ddp, 8)
    return [line for line in lines if line.startswith(("Compression stats", "Start to apply"))]


def both_reports() -> tuple[list[str], list[str]]:
    return reports(commhooks, "commhooks"), reports(torch_powersgd, torch_powersgd.__name__)


def test_compression_statistics_are_logged_as_torch_logs_them(run_ranks):
    for ours, theirs in run_ranks(both_reports):
        assert ours == theirs and len(ours) == 1 + 3
    source = inspect.getsource(torch_powersgd._report_compression_stats)
    assert "Compression stats: iter %s, total before compression" in source
