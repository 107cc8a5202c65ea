"""A shared secret: nothing is served or accepted without it, and it is shown nowhere."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from commhooks.members import client as client_module
from commhooks.members.client import Client
from commhooks.members.lines import Lines
from commhooks.members.report import Report
from commhooks.members.secret import Key, Refused, key_of, refusal
from commhooks.members.state_server import StateServer

SECRET = "correct horse battery"


@pytest.fixture
def server() -> Iterator[StateServer]:
    status = lambda: {"id": "a:1"}  # noqa: E731
    waited = mock.Mock()
    made = StateServer("127.0.0.1", lambda: 60.0, status, waited, key=Key(SECRET))
    made.waited = waited  # type: ignore[attr-defined]
    made.serve(3, b"a form", [torch.arange(5.0)], ["b:1"])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (None, r"refuses this machine: the request has no proof of the secret"),
        (Key("another secret"), r"refuses this machine: the request has another secret"),
    ],
)
def test_nothing_is_served_without_the_secret(
    server: StateServer, key: Key | None, sentence: str
) -> None:
    client = Client(key)
    for ask in (
        lambda: client.ask(server.address),
        lambda: client.ask(server.address, "waiting"),
        lambda: client.ask(server.address, "ended/7"),
        lambda: client.fetch(server.address, 3, 1.0),
        lambda: client.watch("a:1", server.address),
    ):
        with pytest.raises(OSError, match=sentence):
            ask()
    client.has_read(server.address, 3, "b:1")
    assert server.serving and not server.waited.called  # type: ignore[attr-defined]
    assert Client(Key(SECRET)).ask(server.address) == {"id": "a:1"}


def test_a_refused_request_is_logged_once_for_each_address_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines, key = Lines(logs=True), Key(SECRET)
    server = StateServer("127.0.0.1", lambda: 60.0, lambda: {"id": "a:1"}, key=key, lines=lines)
    for wrong in (None, Key("wrong horse battery"), None):
        for _ in range(2):
            with pytest.raises(OSError, match="refuses"):
                Client(wrong).ask(server.address)
    for number in range(200):  # from whoever reaches the port
        server._log(
            f"10.0.0.{number}", Refused("the clocks of the machines differ", f" by {number}")
        )
    server.close()
    said = [record.getMessage() for record in caplog.records]
    begin = "commhooks: members: a request from 127.0.0.1 is refused: the request has"
    assert said[:2] == [f"{begin} no proof of the secret", f"{begin} another secret"]
    assert len(said) == 100 and not any(
        SECRET in line or "another secret " in line for line in said
    )


def test_nothing_is_accepted_without_the_secret() -> None:
    """From a server that does not know it, or from somebody on the way."""
    client = Client(Key(SECRET))
    open_server = StateServer("127.0.0.1", lambda: 60.0, lambda: {"id": "a:1"})
    with pytest.raises(OSError, match="has no proof of the secret"):
        client.ask(open_server.address)
    open_server.close()
    served = StateServer("127.0.0.1", lambda: 60.0, lambda: {"id": "a:1"}, key=Key(SECRET))
    served.serve(3, b"", [torch.arange(5.0)], ["b:1"])
    _, read = client.fetch(served.address, 3, 1.0)
    arrived = torch.zeros(5)
    read(0, arrived)
    assert torch.equal(arrived, torch.arange(5.0))
    readinto = client_module.http.client.HTTPResponse.readinto

    def changed(answer: Any, view: Any) -> int:
        count: int = readinto(answer, view)
        view[0] ^= 1
        return count

    with (
        mock.patch.object(client_module.http.client.HTTPResponse, "readinto", changed),
        pytest.raises(OSError, match="has no proof of the secret"),
    ):
        read(0, arrived)
    served.close()


def test_a_request_counts_once_for_one_server_for_a_while() -> None:
    key, other = Key(SECRET), Key(SECRET)
    nonce, header = key.sign_request("host:1", "/status", now=1000.0)
    assert other.check_request("host:1", "/status", header, now=1100.0) == nonce
    for server, path, now, sentence in (
        ("host:1", "/status", 1101.0, "was sent before"),
        ("host:2", "/status", 1101.0, "has another secret"),
        ("host:1", "/state/3/0", 1101.0, "has another secret"),
        ("host:1", "/status", 1301.0, "clocks of the machines differ by 301 s"),
    ):
        with pytest.raises(Refused, match=sentence):
            other.check_request(server, path, header, now=now)
    _, late = key.sign_request("host:1", "/status", now=2000.0)
    other.check_request("host:1", "/status", late, now=2000.0)
    assert len(other._used) == 1, "old ones are forgotten"
    for damaged in ("", "x", "x y", "x y z", None):
        with pytest.raises(Refused):
            other.check_request("host:1", "/status", damaged, now=2000.0)


def test_a_report_has_a_proof() -> None:
    key = Key(SECRET)
    report = Report(id="a:1", step=3, servers=("10.0.0.1:1",), anchor=2**62).to_json()
    sent = key.sign_report("a:1", report)
    assert Key(SECRET).knows("a:1", copy.deepcopy(sent))
    assert not Key("another secret").knows("a:1", sent)
    for id, content in (
        ("b:1", sent),
        ("a:1", sent | {"step": 4}),
        ("a:1", report),
        ("a:1", sent | {"proof": 7}),
        ("a:1", None),
    ):
        assert not key.knows(id, content)


SIGNED = Key(SECRET).sign_report("a:1", Report(id="a:1").to_json())
JOINED = Key(SECRET).sign_report("a:1", Report(id="a:1", joined=True).to_json())
UNSIGNED = Report(id="a:1", joined=True).to_json()
RIGHT, WRONG = Key(SECRET), Key("another secret")


@pytest.mark.parametrize(
    ("me", "joined", "key", "other", "reason", "lines"),
    [
        ("b:1", False, RIGHT, SIGNED, "", []),
        ("b:1", False, None, SIGNED, "machine b has no secret, and machine a has one", []),
        ("b:1", True, None, SIGNED, "", []),
        ("b:1", False, None, UNSIGNED, "", []),
        ("b:1", False, RIGHT, UNSIGNED, "", ["machine a has no secret, and does not take part"]),
        (
            "b:1",
            False,
            WRONG,
            SIGNED,
            "machine b has another secret than machine a",
            ["machine a has another secret, and does not take part"],
        ),
        ("b:1", True, WRONG, SIGNED, "", ["machine a has another secret, and does not take part"]),
        ("A:1", False, WRONG, SIGNED, "", ["machine a has another secret, and does not take part"]),
        (
            "A:1",
            False,
            WRONG,
            JOINED,
            "machine A has another secret than machine a",
            ["machine a has another secret, and does not take part"],
        ),
        ("b:1", False, RIGHT, {"of": "another job"}, "", []),
    ],
)
def test_who_does_not_know_the_secret(
    me: str, joined: bool, key: Key | None, other: Any, reason: str, lines: list[str]
) -> None:
    text, said = refusal(me, joined, key, [("a:1", other), (me, {"commhooks": 0})])
    assert text.startswith(reason) and bool(text) == bool(reason) and said == lines


def test_the_secret_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMHOOKS_SECRET", raising=False)
    options = commhooks.Torchft(secret=SECRET)
    key = key_of(options.secret)
    for shown in (repr(options), str(options), repr(key), repr(vars(Client(key)))):
        assert SECRET not in shown
    with pytest.raises(TypeError):
        pickle.dumps(key)
    assert key_of(None) is None
    monkeypatch.setenv("COMMHOOKS_SECRET", SECRET)
    assert key_of(None) is not None
    for short in ("short", ""):
        with pytest.raises(
            commhooks.HookConfigError, match="Torchft: secret has . characters; exp"
        ):
            commhooks.Torchft(secret=short)
    monkeypatch.setenv("COMMHOOKS_SECRET", "hunter2")
    with pytest.raises(commhooks.HookConfigError, match="COMMHOOKS_SECRET has 7 char") as error:
        key_of(None)
    assert "hunter2" not in str(error.value)
    with pytest.raises(commhooks.HookConfigError, match="Torchft: secret is a int"):
        commhooks.Torchft(secret=12345678901234567890)  # type: ignore[arg-type]
