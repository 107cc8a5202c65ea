"""What the doctor makes of its figures: advice, estimates for other links, table and picture."""

from pathlib import Path

import pytest

from commhooks import DoctorError
from commhooks.comm.link import Link, bandwidth
from commhooks.tools.doctor.measure import Measured
from commhooks.tools.doctor.recommend import Advice, estimate_ms, pays_below, recommend
from commhooks.tools.doctor.report import DoctorReport
from commhooks.tools.doctor.run import _candidates


def measured(label: str, *step_ms: float, mb: float = 0.0, codec_ms: float = 0.1) -> Measured:
    (candidate,) = [each for each in _candidates((1, 2, 4), {}) if each.label == label]
    samples = list(step_ms) * (1 if len(step_ms) > 1 else 5)
    return Measured(candidate, samples, [codec_ms] * len(samples), bytes_sent=int(mb * 1e6))


def figures(**ms: float | tuple[float, ...]) -> dict[str, Measured]:
    """`r4=...` is PowerSGD at rank 4; megabytes as a model of 100 MB would send them."""
    mb = {"noop": 0, "allreduce": 100, "fp16": 50, "bf16": 50, "r1": 0.5, "r2": 1, "r4": 2}
    found = {}
    for name, value in ms.items():
        label = f"powerSGD rank {name[1:]}" if name in ("r1", "r2", "r4") else name
        found[label] = measured(label, *(value if isinstance(value, tuple) else (value,)), mb=mb[name])
    return found


def advice(found: dict[str, Measured], mbit_per_s: float = 1000) -> Advice:
    return recommend(found, Link(mbit_per_s, 0.2), world_size=2)


# Those measured on a link between two namespaces at 100 Mbit/s, 1 Gbit/s and without a limit, and made-up ones.
@pytest.mark.parametrize(
    "found, use",
    [
        (figures(noop=24, allreduce=1539, fp16=773, bf16=756, r1=46, r2=59, r4=76), "powerSGD rank 1"),
        (figures(noop=37, allreduce=156, fp16=95, bf16=94, r1=41, r2=42, r4=53), "powerSGD rank 2"),
        (figures(noop=25, allreduce=45, fp16=47, bf16=43, r1=42, r2=42, r4=47), "allreduce"),
        (figures(noop=192, allreduce=1093, fp16=592, bf16=590, r1=277, r4=297), "powerSGD rank 4"),
        # A fast network: nothing could be won, whatever a lucky candidate shows.
        (figures(noop=95, allreduce=100, fp16=70, bf16=99, r1=60), "allreduce"),
        # Half the bytes are about as good: the gradients stay what they are.
        (figures(noop=50, allreduce=100, fp16=60, bf16=62, r1=58), "bf16"),
        (figures(noop=50, allreduce=100, fp16=60, bf16=90, r1=58), "fp16"),
        # Faster in the middle, and not to be told from chance.
        (figures(noop=50, allreduce=(60, 90, 100, 110, 120), r1=(20, 30, 70, 95, 100)), "allreduce"),
        (figures(noop=50, allreduce=(98, 99, 100, 110, 120), r1=(20, 30, 70, 75, 79)), "powerSGD rank 1"),
        (figures(noop=50, allreduce=100, r1=92), "allreduce"),
        (figures(noop=50, allreduce=100, r1=90), "powerSGD rank 1"),
        (figures(noop=50, allreduce=100), "allreduce"),
    ],
)
def test_advice(found: dict[str, Measured], use: str) -> None:
    told = advice(found)
    assert told.use == use and told.compress == (use != "allreduce")
    assert told.reason.startswith(f"Use {use}. " if told.compress else "Do not compress. ")
    assert told.headroom == pytest.approx(found["allreduce"].median_ms / found["noop"].median_ms)
    assert told.speedup == pytest.approx(found["allreduce"].median_ms / found[use].median_ms)
    assert (told.hook is not None) == told.compress
    if "powerSGD" in use:
        assert told.hook_options == {"matrix_approximation_rank": int(use[-1])}
        assert any("compare the accuracy" in note for note in told.notes)
    assert any("GradScaler" in note for note in told.notes) == (use == "fp16")


def test_advice_says_why_not_and_what_is_uncertain() -> None:
    assert "no hook could make it faster by more than 5 %" in advice(figures(noop=95, allreduce=100)).reason
    assert "the fastest, powerSGD rank 1, takes 92 ms" in advice(figures(noop=50, allreduce=100, r1=92)).reason
    steady = advice(figures(noop=50, allreduce=100, r1=60))
    assert not any("vary a lot" in note or "fewer than 5" in note for note in steady.notes)
    busy = figures(noop=24, allreduce=156, r1=45)
    busy["powerSGD rank 1"].codec_ms = [15.0] * 5
    assert any("it is faster with the native kernel" in note for note in advice(busy).notes)
    busy["powerSGD rank 1"].kernel = "native"
    assert not any("kernel" in note for note in advice(busy).notes + steady.notes)
    shaky = advice(figures(noop=(20, 50, 90), allreduce=(100, 100, 100)))
    assert [note[:25] for note in shaky.notes] == ["The steps of noop vary a ", "Some figures come from fe"]


def test_estimates_meet_the_measured_point_and_fall_with_bandwidth() -> None:
    found, link = figures(noop=50, allreduce=450, fp16=250, r1=60), Link(2000, 0.2)
    grid = [10**i for i in range(8)]
    for each in found.values():
        assert estimate_ms(each, found["noop"], link, 2000, 2) == pytest.approx(each.median_ms)
        curve = [estimate_ms(each, found["noop"], link, mbit_per_s, 2) for mbit_per_s in grid]
        assert curve == sorted(curve, reverse=True) and curve[-1] == pytest.approx(50, abs=0.2)
    plain = found["allreduce"]
    assert estimate_ms(plain, found["noop"], link, 200, 2) == pytest.approx(50 + 4000, rel=0.01)
    # What is hidden here is not hidden on a slower link: 100 MB at 100 Mbit/s are 8 s.
    hidden = figures(noop=500, allreduce=500)
    assert estimate_ms(hidden["allreduce"], hidden["noop"], link, 100, 2) == pytest.approx(500 + 8000 - 400)
    # On a faster one its bytes are gone from the step before all of their time is: half of these 400 ms are hidden.
    half = figures(noop=500, allreduce=700)
    assert estimate_ms(half["allreduce"], half["noop"], link, 4000, 2) == pytest.approx(500.1)
    below = pays_below(found, link, 2)
    assert below is not None and below > 2000
    assert advice(found, 2000).pays_below_mbit_per_s == below
    assert pays_below(figures(noop=50, allreduce=50), link, 2) is None


def test_noise_does_not_let_more_bytes_win_on_a_slow_link() -> None:
    # Measured with other things going on: rank 1 and plain all-reduce came out far too slow.
    found, link = figures(noop=50, allreduce=900, fp16=250, r1=100, r4=55), Link(2000, 0.2)
    for mbit_per_s in (1, 10, 30):
        curves = {label: estimate_ms(each, found["noop"], link, mbit_per_s, 2) for label, each in found.items()}
        assert sorted(curves, key=curves.__getitem__) == sorted(curves, key=lambda label: found[label].bytes_sent)
    # Half a megabyte at 10 Mbit/s: what took long for another reason here does not take 200 times as long there.
    assert estimate_ms(found["powerSGD rank 1"], found["noop"], link, 10, 2) == pytest.approx(100 + 400 - 2)
    # Nor does it make a hook look worthwhile where there is nothing to win.
    assert estimate_ms(found["allreduce"], found["noop"], link, 1e7, 2) == pytest.approx(50, abs=0.3)
    below = pays_below(found, link, 2)
    assert below is not None and below < 400_000


def test_quartiles_and_bandwidths() -> None:
    assert measured("noop", 3.0).quartiles_ms == (3, 3) and measured("noop", 1, 2, 3, 4, 5).quartiles_ms == (2, 4)
    assert [bandwidth(x) for x in (94.3, 956, 999, 9600, 1.2e5)] == [
        "94 Mbit/s", "960 Mbit/s", "1 Gbit/s", "9.6 Gbit/s", "120 Gbit/s",
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- table and picture


def report_of(found: dict[str, Measured], mbit_per_s: float = 1000) -> DoctorReport:
    found["allreduce"].bytes_uncompressed = 100_000_000
    return DoctorReport(found, Link(mbit_per_s, 0.2), advice(found, mbit_per_s), 2, "gloo")


def test_the_table() -> None:
    text = str(report_of(figures(noop=192, allreduce=1093, fp16=592, r1=277)))
    assert max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines()]
    assert ["allreduce", "1093.0", "(1093.0", "..", "1093.0)", "1.00", "100.000", "0.1", "-"] in rows
    assert ["powerSGD", "rank", "1", "<-", "277.0", "(277.0", "..", "277.0)", "3.95", "0.500", "0.1", "-"] in rows
    assert "commhooks.attach(ddp_model, 'powerSGD', hook_options={'matrix_approximation_rank': 1})" in text
    assert "Estimate: compression is worth it on links of up to about " in text
    assert text.index("Use powerSGD rank 1.") == 0 and text.index("attach(") < text.index("2 ranks, gloo, ")
    text = str(report_of(figures(noop=100, allreduce=101, r1=130), 100_000))
    assert "attach(" not in text and "allreduce <-" in text and "Do not compress." in text


def test_the_picture(tmp_path: Path) -> None:
    report = report_of(figures(noop=192, allreduce=1093, fp16=592, r1=277))
    report.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    report.plot(tmp_path / "a.svg")  # text as paths, with the words in comments
    drawing = (tmp_path / "a.svg").read_text()
    labels = ("powerSGD rank 1", "fp16", "allreduce (no hook)", "noop (no exchange)")
    for words in (*labels, "your link: measured (median, quartiles)"):
        assert drawing.count(f"<!-- {words} -->") == 1
    assert "fill: #d62728" in drawing.partition("<!-- powerSGD rank 1 -->")[2][:200]  # the advice
    assert "fill: #d62728" not in drawing.partition("<!-- fp16 -->")[2][:200]
    with pytest.raises(DoctorError, match="the plot cannot be written"):
        report.plot(tmp_path / "a.docx")
