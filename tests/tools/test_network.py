"""`commhooks network`: what it measures, predicts and advises."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.tools import network
from commhooks.tools.cli import main
from commhooks.tools.network import (
    MOST,
    Interface,
    Link,
    NetworkReport,
    Pair,
    busiest,
    cluster_of,
    measure,
    measure_link,
    pairs_to_measure,
    parsed_size,
    sent_bytes,
)
from commhooks.tools.step_cost import (
    CANDIDATES,
    Cluster,
    Collectives,
    exchanges,
    sharded_exchanges,
    transformer,
)

CPU = torch.device("cpu")


def _measure() -> tuple[dict[str, Any], str]:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(network, "_ENOUGH_S", 0.01):
        report = measure(group, {"1M": 1e6}, step_ms=None)
    return json.loads(json.dumps(report.as_dict())), str(report)


def test_all_ranks_get_the_same_report(run_ranks: Any) -> None:
    reports = run_ranks(_measure, world_size=3)
    report, text = reports[0]
    assert [pair["ranks"] for pair in report["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["mbit_per_s"] > 0 and pair["latency_ms"] > 0 for pair in report["pairs"])
    assert list(report["machines"].values()) == [[0, 1, 2]]
    assert (
        report["link"]["mbit_per_s"] > 0
        and 0 < report["link"]["latency_ms"] / 1000 < report["took_s"]
    )
    assert report["advice"] and report["advice"][-1] in " ".join(text.split())
    rows = ["plain DDP", "bf16", "int8", "powerSGD rank 4", "diloco, every 30 steps", "1 - 2"]
    for name in [*rows, "fully_shard", 'shards="int8"']:
        assert name in text
    for same, _ in reports[1:]:
        same["took_s"] = report["took_s"]
        assert same == report


def test_pairs_are_those_of_all_ranks_or_of_machines() -> None:
    assert pairs_to_measure([[0, 2], [1, 3]]) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    eight = [list(range(8 * node, 8 * node + 8)) for node in range(4)]
    between = [(0, 8), (0, 16), (0, 24), (8, 16), (8, 24), (16, 24)]
    assert pairs_to_measure(eight) == [*between, (0, 1)]
    assert pairs_to_measure([[rank] for rank in range(40)]) == [
        (rank, rank + 1) for rank in range(39)
    ]
    assert len(pairs_to_measure([[rank] for rank in range(12)])) == MOST


def test_the_interface_is_the_one_whose_counter_grows(tmp_path: Path) -> None:
    def sent(**counters: int) -> None:
        for name, count in counters.items():
            (tmp_path / name / "statistics").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "statistics" / "tx_bytes").write_text(f"{count}\n")

    assert sent_bytes(tmp_path / "nowhere") == {}
    sent(lo=5, eth0=100, ib0=7)
    (tmp_path / "eth0" / "speed").write_text("1000\n")
    (tmp_path / "ib0" / "speed").write_text("-1\n")
    before = sent_bytes(tmp_path)
    assert before == {"lo": 5, "eth0": 100, "ib0": 7}
    sent(lo=9_000_000, eth0=2_000_000)
    assert busiest(before, others=True, system=tmp_path) == Interface("eth0", 1000.0)
    assert busiest(before, others=False, system=tmp_path) == Interface("lo")
    sent(ib0=3_000_000)
    assert busiest(before, others=True, system=tmp_path) == Interface("ib0")
    sent(eth0=99_000, ib0=99_000)  # what a rank says to others anyway
    assert busiest(before, others=True, system=tmp_path).words == "interface unknown"


def test_sizes_of_models_are_read_and_built() -> None:
    assert [parsed_size(text) for text in ("350k", "124M", "1.5B", "7b", "1000")] == [
        3.5e5,
        1.24e8,
        1.5e9,
        7e9,
        1e3,
    ]
    for wrong in ("big", "", "1.5.2M", "0", "-3M", "12T"):
        with pytest.raises(
            commhooks.HookConfigError, match="expected a number of parameters such as 350k"
        ):
            parsed_size(wrong)
    for numel in (1e6, 1.24e8, 1.5e9):
        assert sum(parameter.numel() for parameter in transformer(numel).values()) == pytest.approx(
            numel, rel=0.15
        )


def test_bytes_and_messages_are_those_counted_by_hand() -> None:
    """Of docs/commands.md."""

    def seconds(
        nodes: int, counted: float, kinds: Any, together: int, backend: Any, latency: float = 0.0
    ) -> float:
        cluster = Cluster(nodes, together, 1e9, 9e9, latency, backend)
        return cluster.seconds(Collectives(counted, kinds, 3), together)

    assert seconds(2, 100e6, ("sum",), 1, "nccl") == pytest.approx(0.8)
    assert seconds(4, 100e6, ("sum",), 1, "nccl") == pytest.approx(1.2)
    # Up and down a tree of 8, for each of 3 buckets; a ring with gloo.
    assert seconds(8, 0, ("sum",), 1, "nccl", 1.0) == 3 * 2 * 3
    assert seconds(8, 0, ("sum",), 1, "gloo", 1.0) == 3 * 2 * 7
    # Four nodes of eight ranks: each rank sends to the 24 of other nodes, and all of a node over
    # one card.
    for ops, per_byte, messages in (
        (("sum",), 2 * 31 / 32, {"nccl": 10, "gloo": 62}),
        (("all_to_all",), 2 * 8 * 24 / 32, {"nccl": 24, "gloo": 24}),
    ):
        for backend, number in messages.items():
            expected = 8 * per_byte * 100e6 / 1e9 + 3 * number
            assert seconds(4, 100e6, ops, 8, backend, 1.0) == pytest.approx(expected)
    assert seconds(4, 100e6, ("gather",), 8, "nccl", 1.0) == pytest.approx(
        8 * 2 * 31 / 32 * 0.1 + 3 * 31
    )
    assert seconds(4, 100e6, ("gather",), 8, "gloo", 1.0) == pytest.approx(
        8 * 2 * 8 * 24 / 32 * 0.1 + 3 * 24
    )
    both = seconds(4, 100e6, ("all_to_all", "gather"), 8, "gloo")
    # half of the bytes in either
    assert both == pytest.approx(seconds(4, 100e6, ("gather",), 8, "gloo"))


def test_predictions_follow_from_link_and_cluster() -> None:
    link = Link(mbit_per_s=1000.0, latency_ms=4.0)
    # one machine: each rank sends over its network card
    alone = cluster_of([[0, 1]], link, 9000.0, "gloo")
    assert (alone.machines, alone.ranks_per_machine, alone.bandwidth) == (2, 1, 1e9)
    assert 2 * alone.latency == pytest.approx(4e-3)  # an all-reduce of two ranks is two messages
    uneven = cluster_of([[0, 1], [2]], link, 9000.0, "gloo")
    assert (uneven.machines, uneven.ranks_per_machine) == (3, 1)
    nodes = cluster_of([[0, 1], [2, 3]], link, 9000.0, "gloo")
    assert (nodes.machines, nodes.ranks_per_machine, nodes.inside) == (2, 2, 9e9)
    numel = sum(parameter.numel() for parameter in transformer(1e8).values())
    by_label = {exchange.candidate.label: exchange for exchange in exchanges(1e8, nodes)}
    assert list(by_label) == [candidate.label for candidate in CANDIDATES]
    plain = by_label["plain DDP"]
    buckets = math.ceil(4 * numel / 25 / 2**20)
    assert (
        plain.seconds == pytest.approx(8 * 1.5 * 4 * numel / 1e9 + buckets * 4e-3)
        and not plain.between_nodes
    )
    assert by_label["bf16"].between_nodes
    inside = 8 * 4 * numel / 9e9
    assert by_label["bf16"].seconds == pytest.approx(
        8 * 2 * numel / 1e9 + inside + 2 * buckets * 4e-3 / 6, rel=1e-3
    )
    assert (
        by_label["diloco, every 30 steps"].seconds < by_label["diloco, every 5 steps"].seconds / 5
    )


def test_the_codec_of_shards_runs_for_each_gather_and_for_the_scatter() -> None:
    cluster = Cluster(2, 1, 1e9, 9e9, 1e-3, "gloo", memory=1e9)
    once, twice = (
        [exchange.codec_s for exchange in sharded_exchanges(1e8, cluster, gathers)]
        for gathers in (1, 2)
    )
    assert once == pytest.approx([2 / 3 * seconds for seconds in twice]) and any(once)


def test_a_sharded_step_gathers_twice_and_scatters_once() -> None:
    """By hand: N nodes of L ranks at 1 Gbit/s, whole models of 4 bytes per parameter."""
    numel = sum(parameter.numel() for parameter in transformer(1e8).values())
    units = len(transformer(1e8)) / 5

    def predicted(nodes: int, together: int, backend: Any, gathers: float = 2) -> dict[str, Any]:
        cluster = Cluster(nodes, together, 1e9, 9e9, 1e-3, backend)
        made = sharded_exchanges(1e8, cluster, gathers)
        assert [e.between_nodes for e in made] == [False, together > 1, together > 1]
        return {e.candidate.label: e for e in made}

    for nodes, together in ((2, 1), (4, 8)):
        ring = (nodes * together - 1) / (nodes * together)
        nccl, gloo = (predicted(nodes, together, backend) for backend in ("nccl", "gloo"))
        plain = nccl["fully_shard"]
        assert plain.bytes_leaving == pytest.approx(3 * ring * 4 * numel)
        latencies = 3 * units * (nodes * together - 1) * 1e-3
        assert plain.seconds == pytest.approx(8 * plain.bytes_leaving / 1e9 + latencies)
        # its reduce-scatter on gloo is an all-reduce
        assert gloo["fully_shard"].bytes_leaving == pytest.approx(4 * ring * 4 * numel)
        once = predicted(nodes, together, "nccl", gathers=1)
        assert once["fully_shard"].bytes_leaving == pytest.approx(2 * ring * 4 * numel)
        for of_backend in (nccl, gloo):  # each number crosses between two nodes once
            int8 = of_backend['shards="int8"']
            sent = 3 * (nodes - 1) / nodes * (1 + 4 / 128) * numel
            assert int8.bytes_leaving == pytest.approx(sent)
            inside = (together - 1) / together * (2 * (1 + 4 / 128) + 4) * numel
            latencies = 3 * units * (nodes - 1) * 1e-3
            assert int8.seconds == pytest.approx(8 * sent / 1e9 + 8 * inside / 9e9 + latencies)


def test_the_codec_takes_time_and_less_between_nodes() -> None:
    fast, slow = (Cluster(2, 4, 1e9, 9e9, 0.0, "nccl", memory=m) for m in (math.inf, 1e9))
    numel = sum(parameter.numel() for parameter in transformer(1e8).values())
    for at_once, later in zip(exchanges(1e8, fast), exchanges(1e8, slow), strict=True):
        passes = later.candidate.passes / later.candidate.options.get("sync_every", 1)
        passes /= 4 if later.between_nodes else 1  # a quarter of the gradients on each rank
        assert at_once.codec_s == 0 and later.codec_s == pytest.approx(4 * passes * numel / 1e9)
        assert later.seconds >= at_once.seconds
    for at_once, later in zip(
        sharded_exchanges(1e8, fast), sharded_exchanges(1e8, slow), strict=True
    ):
        assert later.seconds == pytest.approx(at_once.seconds + later.codec_s)


def _report(**changes: Any) -> NetworkReport:
    link = Link(1000.0, 0.1)
    pairs = [
        Pair((0, 1), 20_000.0, 0.01),
        Pair((0, 2), 1000.0, 0.1),
        Pair((1, 2), 900.0, 0.1),
        Pair((0, 3), 950.0, 0.1),
    ]
    machines = {"one": [0, 1], "two": [2, 3]}
    at = {"one": Interface("eth0", 1000.0), "two": Interface("eth0", 1000.0)}
    exchanges_of = {
        "124M": exchanges(1.24e8, cluster_of(list(machines.values()), link, 20_000.0, "gloo"))
    }
    as_usual = {
        "machines": machines,
        "interfaces": at,
        "backend": "gloo",
        "pairs": pairs,
        "link": link,
    }
    return NetworkReport(
        **{**as_usual, "exchanges": exchanges_of, "sharded": {}, "step_ms": None, "took_s": 1.0}
        | changes
    )


def test_the_advice_names_a_hook_or_that_nothing_is_needed() -> None:
    (only,) = _report().advice()
    assert only.startswith(
        "124M parameters: with plain DDP a step spends 6 s on the network. If it computes for 40"
        " s or"
    )
    assert only.endswith('hook="diloco" sends the least. --step-ms names one.')
    (enough,) = _report(step_ms=120_000.0).advice()
    assert enough.endswith(
        "spends 6 s on the network, beside 120000 ms of computing: nothing needed."
    )
    (some,) = _report(step_ms=20_000.0).advice()
    assert (
        'With hook="bf16_compress", ranks_per_node="auto" it would be' in some
        and ": small beside" in some
    )
    (least,) = _report(step_ms=1.0).advice()
    assert (
        "hook=\"diloco\", hook_options={'sync_every': 30}" in least
        and "the least of all, but not small" in least
    )
    slow = Pair((1, 3), 90.0, 0.1)
    connection, _ = _report(pairs=[*_report().pairs, slow]).advice()
    assert connection.startswith(
        "Ranks 1 and 3 reach 90 Mbit/s where 920 Mbit/s is usual between machines"
    )
    interface, _ = _report(
        interfaces=dict.fromkeys(("one", "two"), Interface("eth0", 10_000.0))
    ).advice()
    assert interface.startswith(
        "one (and 1 more) sends over eth0, rated at 10 Gbit/s, but reaches 1 Gbit/s."
    )


def test_the_report_says_what_differs_between_its_rates() -> None:
    """The two rates share one unit, and on one machine neither is the speed of a network."""
    two_machines = " ".join(str(_report(link=Link(11_000.0, 2.0))).split())
    assert " 0 - 1 20,000 0.01 " in two_machines and " all at once 11,000 2 " in two_machines
    assert "Two ranks: one large message in one direction while no other rank sends" in two_machines
    assert (
        "All at once: what every rank sends, and receives at the same time, in an all-reduce"
        in two_machines
    )
    assert network.ONE_MACHINE not in two_machines
    assert network.ONE_MACHINE in " ".join(str(_report(machines={"one": [0, 1, 2, 3]})).split())


def test_the_report_reads_well_as_text() -> None:
    assert "  one: rank 0; " in str(_report(machines={"one": [0], "two": [1, 2, 3]}))
    assert [network._figures(value) for value in (0.03456, 999.0, 2751.4)] == [
        "0.0346",
        "999",
        "2,751",
    ]


def test_of_hooks_that_nearly_fit_the_least_lossy_is_advised() -> None:
    """At 9.2 Gbit/s and 0.8 ms, beside steps of 300 ms, PowerSGD takes 35 ms."""
    cluster = cluster_of([[0, 1]], Link(9200.0, 0.8), 9200.0, "gloo")
    exchanges_of = {
        size: exchanges(numel, cluster)
        for size, numel in (("350k", 3.5e5), ("124M", 1.24e8), ("1.5B", 1.5e9))
    }
    powersgd = exchanges_of["124M"][4]
    assert powersgd.candidate.label == "powerSGD rank 4" and 0.030 < powersgd.seconds < 0.040
    small, middle, large = _report(exchanges=exchanges_of, step_ms=300.0).advice()
    assert small.startswith("350k parameters: ") and small.endswith(
        "beside 300 ms of computing: nothing needed."
    )
    assert (
        "124M parameters: " in middle and 'hook="powerSGD"' in middle and ": small beside" in middle
    )
    assert large.startswith("1.5B parameters: ") and 'hook="diloco"' in large


def test_one_line_says_what_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["network"]) == 1
    assert "no process group: start this like the run" in capsys.readouterr().err
    assert main(["network", "--params", "huge"]) == 1
    assert "--params huge: expected a number" in capsys.readouterr().err
    for value in ("0.0", "nan", "inf"):  # JSON has no infinite number
        assert main(["network", "--step-ms", value]) == 1
        assert f"--step-ms {value}: expected a number above 0" in capsys.readouterr().err
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["network", "--backend", "gloo"]) == 1
    assert "there is one rank, and no network to measure" in capsys.readouterr().err
    assert main(["network", "--backend", "glo"]) == 1
    assert (
        "the ranks cannot make a process group with backend 'glo': Unknown backend"
        in capsys.readouterr().err
    )


def _command() -> str:
    def measured(
        group: dist.ProcessGroup, sizes: dict[str, float], step_ms: float, gathers: int
    ) -> NetworkReport:
        assert gathers == 2
        cluster = cluster_of([[0, 1]], Link(1000.0, 0.1), 1000.0, "gloo")
        return _report(
            step_ms=step_ms,
            exchanges={size: exchanges(numel, cluster) for size, numel in sizes.items()},
        )

    with (
        mock.patch.object(network, "measure", measured),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        assert main(["network", "--json", "--params", "350k", "--step-ms", "5"]) == 0
    return printed.getvalue()


def test_rank_0_alone_prints(run_ranks: Any) -> None:
    first, second = run_ranks(_command)
    assert second == ""
    report = json.loads(first)
    assert (
        report["step_ms"] == 5
        and report["exchanges"]["350k"][0]["candidate"]["label"] == "plain DDP"
    )


def _far_away() -> Link:
    """100 Mbit/s, and 50 ms for each message."""
    with mock.patch.object(
        network, "_all_reduce_s", lambda buffer, group: 0.05 + 8e-8 * buffer.nbytes
    ):
        return measure_link(dist.group.WORLD, CPU)  # type: ignore[arg-type]


def test_a_long_latency_is_no_low_bandwidth(run_ranks: Any) -> None:
    for measured in run_ranks(_far_away):
        assert measured.latency_ms == pytest.approx(50, rel=0.01)
        assert measured.mbit_per_s == pytest.approx(100, rel=0.01)
