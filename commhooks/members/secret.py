"""A secret that all machines of a run share. It proves who asks a state server, what it answers,
and who has sent a report: HMAC-SHA256. Nothing is encrypted.
"""

import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from commhooks.members.options import check_secret

VARIABLE = "COMMHOOKS_SECRET"
HEADER = "X-Commhooks-Proof"
PROOF_BYTES = 32
_CLOCKS_DIFFER_S = 300.0
"""How old a request may be, with the difference between the clocks of two machines."""


def key_of(option: str | None) -> "Key | None":
    """Return the key of the secret in the option, or in the environment; None without one. Raises
    HookConfigError.
    """
    secret = option or os.environ.get(VARIABLE, "")
    if not secret:
        return None
    check_secret(secret, VARIABLE if option is None else "Torchft: secret")
    return Key(secret)


class Refused(Exception):
    """Raised for a request without a valid proof; the message says why.

    Attributes:
        reason: the message without numbers.
    """

    def __init__(self, reason: str, by: str = "") -> None:
        super().__init__(reason + by)
        self.reason = reason


class Key:
    """Proves that this machine knows the secret, and checks that others do."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(b"commhooks members\0" + secret.encode()).digest()
        self._used: dict[str, float] = {}  # nonces of requests -> when they may be forgotten
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key is not saved")

    def begun(self, *parts: str) -> "hmac.HMAC":
        """Return a code over `parts`, to which more can be added."""
        text = json.dumps(parts).encode()
        return hmac.new(self._key, len(text).to_bytes(8, "big") + text, "sha256")

    # ---- requests to a state server, and its answers
    # ----------------------------------------------------------------------------------------------

    def sign_request(self, server: str, path: str, now: float | None = None) -> tuple[str, str]:
        """Return a nonce and the value of `HEADER` for a GET request to `server`."""
        nonce, at = secrets.token_hex(16), f"{time.time() if now is None else now:.3f}"
        return nonce, f"{nonce} {at} {self._request(server, path, nonce, at)}"

    def check_request(
        self, server: str, path: str, header: str | None, now: float | None = None
    ) -> str:
        """Return the nonce of a request that `server` has got. Raises Refused; each header counts
        once.
        """
        now = time.time() if now is None else now
        nonce, at, proof = (*(header or "").split(" "), "", "", "")[:3]
        if not proof:
            raise Refused("the request has no proof of the secret")
        if not hmac.compare_digest(proof.encode(), self._request(server, path, nonce, at).encode()):
            raise Refused("the request has another secret")
        if abs(now - float(at)) > _CLOCKS_DIFFER_S:
            raise Refused("the clocks of the machines differ", f" by {now - float(at):.0f} s")
        with self._lock:
            self._used = {nonce: until for nonce, until in self._used.items() if now < until}
            if nonce in self._used:
                raise Refused("the request was sent before")
            self._used[nonce] = now + 2 * _CLOCKS_DIFFER_S
        return nonce

    def _request(self, server: str, path: str, nonce: str, at: str) -> str:
        return self.begun("request", "GET", server, path, nonce, at).hexdigest()

    def answer(self, path: str, nonce: str) -> "hmac.HMAC":
        """Return the code of the answer to a request, to which the content must be added."""
        return self.begun("answer", path, nonce)

    # ---- reports
    # ----------------------------------------------------------------------------------------------

    def sign_report(self, id: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a report of the machine `id`, with a proof."""
        return {**content, "proof": self._report(id, content)}

    def knows(self, id: str, content: object) -> bool:
        """Return whether the report of the machine `id` has a valid proof."""
        if not isinstance(content, Mapping) or not isinstance(proof := content.get("proof"), str):
            return False
        unsigned = {name: value for name, value in content.items() if name != "proof"}
        return hmac.compare_digest(proof.encode(), self._report(id, unsigned).encode())

    def _report(self, id: str, content: Mapping[str, Any]) -> str:
        return self.begun("report", id, json.dumps(content, sort_keys=True)).hexdigest()


def refusal(
    id: str, joined: bool, key: Key | None, quorum: Sequence[tuple[str, object]]
) -> tuple[str, list[str]]:
    """Decide who does not know the secret of the others. Return why the machine `id` must end, ""
    if it need not, and a sentence about each machine whose report does not count.

    A machine that has joined stays. Of machines that begin together, one without a secret ends
    beside one that has one, and of two secrets that of the first machine by id stays.
    """
    name, reason, lines = _name(id), "", []
    for other, content in quorum:
        has_proof = isinstance(content, Mapping) and "proof" in content
        if other == id or not isinstance(content, Mapping) or "commhooks" not in content:
            continue
        if key is None and has_proof and not joined:
            reason = (
                f"machine {name} has no secret, and machine {_name(other)} has one: give it the"
                f" same by {VARIABLE} or commhooks.Torchft(secret=...)"
            )
        elif key is not None and not key.knows(other, content):
            what = "another secret" if has_proof else "no secret"
            lines.append(f"machine {_name(other)} has {what}, and does not take part")
            first = content.get("joined") is True or other < id
            if has_proof and first and not joined:
                reason = (
                    f"machine {name} has another secret than machine {_name(other)}: start it with"
                    " the same"
                )
    return reason, lines


def _name(id: str) -> str:
    return id.rpartition(":")[0]
