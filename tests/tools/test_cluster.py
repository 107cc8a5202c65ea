"""`commhooks plan --nodes`: what leaves a node, by hand, and the command."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from commhooks.comm.link import Network
from commhooks.compressors.candidates import Candidate
from commhooks.tools.cli import main
from commhooks.tools.cluster import Cluster, Prediction, predict
from commhooks.tools.named_model import NamedModel

MB = 1_000_000


def build(layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(layers)))


def _predict(hook: str, cluster: Cluster, buckets: int = 1, **options: Any) -> list[Prediction]:
    """Of a model of two layers in one bucket, or of one layer in each of more buckets."""
    model = NamedModel(dict(build(max(2, buckets)).named_parameters()))
    cap_mb = 25 if buckets == 1 else 1
    return predict(Candidate(hook, hook, options), model, cluster, bucket_cap_mb=cap_mb, total_steps=1000)


def test_rings_of_all_ranks_and_between_nodes() -> None:
    cluster = Cluster(nodes=2, ranks_per_node=2, bandwidth=8e9, inside=16e9, latency=0.0)
    plain, nodes = _predict("allreduce", cluster)
    assert plain.leaving == pytest.approx(1.5 * 8 * MB) and plain.seconds == pytest.approx(1.5 * 8 * MB / 1e9)
    assert nodes.leaving == pytest.approx(8 * MB)
    flat, nodes = _predict("powerSGD", cluster, matrix_approximation_rank=1)
    sent = 4 * (2 * 2 * 1000 + 2)  # P and Q of two matrices, and two flags
    assert flat.leaving == pytest.approx(1.5 * sent) and nodes.leaving == pytest.approx(sent)
    assert not flat.between_nodes and nodes.between_nodes
    # Half of every gradient is another rank's, and travels there and back.
    assert nodes.seconds == pytest.approx(sent / 1e9 + 8 * MB / 2e9)


def test_local_steps_share_the_bytes_and_the_latency_of_a_round() -> None:
    cluster = Cluster(nodes=2, ranks_per_node=4, bandwidth=8e9, inside=1e12, latency=1.0)
    every = 10
    flat, nodes = _predict("local_sgd", cluster, sync_every=every)
    _, plain = _predict("allreduce", cluster)
    # Each of the four ranks of a node sends all weights.
    assert nodes.leaving == pytest.approx(4 * plain.leaving / every, rel=0.01)
    inside = 2 * 3 / 4 * 8 * 8 * MB / 1e12
    messages = Network(2, 8e9, cluster.latency).messages("sum")
    assert nodes.seconds == pytest.approx(inside + messages / every + nodes.leaving / 1e9, rel=0.01)
    assert flat.seconds > messages / every


def test_an_all_to_all_leaves_the_node_once_per_rank() -> None:
    cluster = Cluster(nodes=4, ranks_per_node=8, bandwidth=1e9, inside=1e9, latency=0.0)
    flat, nodes = _predict("int8_compress", cluster)
    whole = nodes.leaving / (2 * 3 / 4)  # as an all-reduce between four nodes
    assert 2 * MB < whole < 2.1 * MB
    assert flat.leaving == pytest.approx(whole * (8 * 24 / 32 + 31 / 32))


def test_messages_cost_their_latency() -> None:
    cluster = Cluster(nodes=3, ranks_per_node=2, bandwidth=1e15, inside=1e15, latency=1.0)
    flat, nodes = _predict("powerSGD", cluster, buckets=4, matrix_approximation_rank=1)
    assert flat.seconds == pytest.approx(4 * 2 * 6, rel=1e-3)  # buckets, rounds, up and down a tree of six
    assert nodes.seconds == pytest.approx(4 * 2 * 4, rel=1e-3)  # a ring of three
    near = dataclasses.replace(cluster, bandwidth=1e18, inside=1e18, latency=1e-3)
    flat, nodes = _predict("int4_compress", near, buckets=4)
    assert flat.seconds == pytest.approx(4 * (4 + 5) * 1e-3, rel=1e-3)
    assert nodes.seconds == pytest.approx(4 * (2 + 2) * 1e-3, rel=1e-3)
    (alone,) = _predict("int4_compress", Cluster(3, 1, 1e9, 1e9, 0.0))
    assert not alone.between_nodes


def test_the_command(capsys: Any) -> None:
    arguments = ["plan", f"{__name__}:build", "--nodes", "16", "--bandwidth", "25"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "16 nodes of 8 ranks, 25 Gbit/s between nodes" in text and "Assumed: the ranks" in text
    assert "MB leave a node" in text
    assert all(hook in text for hook in ("allreduce", "bf16_compress", "int8_compress", "powerSGD, rank 16"))
    assert main(["plan", "tests.support.plan_models:build_mlp", *arguments[2:]]) == 0
    text = capsys.readouterr().out
    assert "kB leave a node" in text and "MB" not in text
    assert main([*arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["cluster"]["nodes"] == 16 and len(content["predictions"]) == 2 * 8
