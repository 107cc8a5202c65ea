"""What the doctor makes of its figures: the hook to use, and the table."""

import json

import pytest

from commhooks.compressors.auto.options import ALLREDUCE, BF16, FP16, INT8, NOOP, powersgd
from commhooks.tools.doctor.measure import Measured
from commhooks.tools.doctor.report import DoctorReport

MB = [(NOOP, 0), (ALLREDUCE, 100), (FP16, 50), (BF16, 50), (INT8, 25), *((powersgd(r, {}), r / 2) for r in (1, 2, 4))]


def report_of(**ms: float) -> DoctorReport:
    """`r4=...` is PowerSGD at rank 4; megabytes as a model of 100 MB would send them."""
    known = {each.label.replace("powerSGD rank ", "r"): (each, mb) for each, mb in MB}
    found = {}
    for name, value in ms.items():
        candidate, mb = known[name]
        made = Measured(candidate, [value, value - 1, value + 1], int(mb * 1e6), 100_000_000)
        made.error = None if candidate is NOOP else candidate.changes / 4
        found[candidate.label] = made
    return DoctorReport(found, 2, "gloo", ("int4",))


@pytest.mark.parametrize(
    ("report", "chosen"),
    [
        # Measured on a link between two namespaces at 100 Mbit/s, 1 Gbit/s and without a limit, and made-up ones.
        (report_of(noop=24, allreduce=1539, fp16=773, bf16=756, r1=46, r2=59, r4=76), "powerSGD rank 1"),
        (report_of(noop=37, allreduce=156, fp16=95, bf16=94, r1=41, r2=42, r4=53), "powerSGD rank 2"),
        (report_of(noop=25, allreduce=45, fp16=47, bf16=43, r1=42, r2=42, r4=47), "allreduce"),
        (report_of(noop=192, allreduce=1093, fp16=592, bf16=590, r1=277, r4=297), "powerSGD rank 4"),
        # Half the bytes are about as good: the gradients stay what they are.
        (report_of(noop=50, allreduce=100, fp16=60, bf16=62, r1=58), "bf16"),
        (report_of(noop=50, allreduce=100, r1=92), "allreduce"),
        (report_of(noop=50, allreduce=100), "allreduce"),
    ],
)
def test_the_choice(report: DoctorReport, chosen: str) -> None:
    assert report.chosen == json.loads(json.dumps(report.as_dict()))["chosen"] == chosen
    text = str(report)
    assert f"{chosen} <-" in text and text.count("<-") == 1
    assert ("train without one" in text) == (chosen == "allreduce") != ("commhooks.attach(ddp_model, " in text)


def test_the_table() -> None:
    text = str(report_of(noop=192, allreduce=1093, fp16=592, r1=277))
    assert max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines()]
    assert ["noop", "192.0", "(191.5", "..", "192.5)", "5.69", "0.000", "-"] in rows
    assert ["allreduce", "1093.0", "(1092.5", "..", "1093.5)", "1.00", "100.000", "0"] in rows
    assert ["powerSGD", "rank", "1", "<-", "277.0", "(276.5", "..", "277.5)", "3.95", "0.500", "0.75"] in rows
    assert "commhooks.attach(ddp_model, 'powerSGD', hook_options={'matrix_approximation_rank': 1})" in text
    assert "int4 compresses no parameter of this model: not measured." in text


def test_an_error_that_is_no_number_is_none_in_json() -> None:
    report = report_of(noop=50, allreduce=100, fp16=60)
    report.measured["fp16"].error = float("inf")
    assert report.as_dict()["candidates"]["fp16"]["error"] is None and "  inf" in str(report)
