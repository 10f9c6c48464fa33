"""Authenticated frames over TCP, between the launchers of several hosts and between ranks. Nothing is encrypted.

    asks     MAGIC | nonce a ──────────────────────────────────────►
             ◄────────── MAGIC | nonce b | HMAC(secret, "answers" a b)   proves that it knows the run's secret
             HMAC(secret, "asks" a b) ─────────────────────────────►     and so does the asking side
    frames   length 4 | kind 1 | number 8 | payload | HMAC-SHA256(key, all before)     a long message takes several

Each direction has its own key, made of the secret and both nonces, and numbers its frames. A frame that was changed,
left out, repeated or taken from another connection ends the connection. Before both proofs, only reads of a fixed size
are made. A payload is a message of ``comm.codec`` or bytes of a state, never a pickle.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from superstep.comm.codec import Codec

M = TypeVar("M")

MAGIC = b"superstep-hosts-2\n"
NONCE = 32
PROOF = hashlib.sha256().digest_size
MOST_BYTES = 2**20
"""The longest payload; a longer one is refused before memory is allocated."""

MOST_FRAMES = 1024
"""The most frames of a message."""

GREETING_S = 3.0
"""Seconds for the other side to prove the secret, and again to say hello."""

SEND_S = 10.0
"""Seconds in which the other side may take nothing."""

_HEAD = struct.Struct("<IBQ")
_ANY: Codec[Any] = Codec(Any)


class WrongSecret(ConnectionError):
    """The other side does not know the run's secret."""


class OtherProtocol(ConnectionError):
    """The other side speaks another protocol."""


class ForeignMessage(ConnectionError):
    """The other side sent a message that is not expected; the error names its field."""


class PayloadKind(IntEnum):
    MESSAGE = 1
    BLOCK = 2
    PART = 3
    """Of a message that the next frame continues."""


class SecureChannel:
    """A connection with a side that knows the secret. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes) -> None:
        self._socket = sock
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        self._one = threading.Lock()

    @property
    def here(self) -> str:
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        return str(self._socket.getpeername()[0])

    def say(self, message: msgspec.Struct) -> None:
        """Send a message; raises OSError where the connection is gone."""
        data = _ANY.encode(message)
        *parts, last = [data[low : low + MOST_BYTES] for low in range(0, len(data), MOST_BYTES)]
        if len(parts) >= MOST_FRAMES:
            raise ValueError(f"a message of {len(data)} bytes; {MOST_FRAMES * MOST_BYTES} is the most")
        with self._one:
            for part in parts:
                self._send(PayloadKind.PART, part)
            self._send(PayloadKind.MESSAGE, last)

    def send(self, kind: PayloadKind, payload: bytes | memoryview) -> None:
        """Send a frame; raises OSError where the connection is gone."""
        if len(payload) > MOST_BYTES:
            raise ValueError(f"a frame of {len(payload)} bytes; {MOST_BYTES} is the most")
        with self._one:
            self._send(kind, payload)

    def _send(self, kind: PayloadKind, payload: bytes | memoryview) -> None:
        head = _HEAD.pack(len(payload), kind, self._sent)
        self._sent += 1
        proof = _proof(self._sends, head, payload)
        if kind is PayloadKind.MESSAGE:
            self._socket.sendall(head + payload + proof)
            return
        for part in (head, payload, proof):
            self._socket.sendall(part)

    def poll(self, seconds: float) -> bool:
        """Whether a frame arrives, or the connection ends, within some seconds."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(math.ceil(1000 * seconds)))

    def receive(self, until_s: float | None = None) -> tuple[PayloadKind, bytes]:
        """The next frame.

        Args:
            until_s: the deadline of the whole frame, by ``time.monotonic``; None waits forever.

        Raises:
            OSError: the connection is gone, or the frame is late or not authentic.
        """
        head = _exactly(self._socket, _HEAD.size, until_s)
        length, kind, number = _HEAD.unpack(head)
        if length > MOST_BYTES:
            raise ConnectionError(f"a frame claims {length} bytes, and {MOST_BYTES} is the most")
        payload = _exactly(self._socket, length, until_s)
        proof = _exactly(self._socket, PROOF, until_s)
        is_right = hmac.compare_digest(proof, _proof(self._receives, head, payload))
        if not is_right or number != self._received or kind not in tuple(PayloadKind):
            raise ConnectionError("a frame is not what the other side sent")
        self._received += 1
        return PayloadKind(kind), payload

    def hear(self, codec: Codec[M], within_s: float | None = None) -> M:
        """The next message; raises OSError like ``receive``, and ForeignMessage where it is none of the codec's."""
        until_s = None if within_s is None else time.monotonic() + within_s
        parts: list[bytes] = []
        kind = PayloadKind.PART
        while kind is PayloadKind.PART and len(parts) < MOST_FRAMES:
            kind, payload = self.receive(until_s)
            parts.append(payload)
        if kind is not PayloadKind.MESSAGE:
            raise ForeignMessage("it sent no whole message")
        try:
            return codec.decode(b"".join(parts))
        except msgspec.DecodeError as error:
            raise ForeignMessage(f"its message is not expected: {error}") from error

    def close(self) -> None:
        """Close the connection; a receiving thread wakes up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask(address: tuple[str, int], secret: bytes, *, timeout_s: float = GREETING_S) -> SecureChannel:
    """Connect to a launcher.

    Raises:
        Stranger: it has another secret.
        Unlike: it speaks another protocol.
        OSError: nobody listens there, or answers in time.
    """
    until_s = time.monotonic() + timeout_s
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.settimeout(None)
        _set_limit(sock, socket.SO_SNDTIMEO, SEND_S)
        ours = secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + ours)
        answer = _exactly(sock, len(MAGIC) + NONCE + PROOF, until_s)
        _require_magic(answer)
        theirs, proof = answer[len(MAGIC) : len(MAGIC) + NONCE], answer[-PROOF:]
        if not hmac.compare_digest(proof, _proof(secret, b"answers", ours + theirs)):
            raise WrongSecret("the other side has another secret")
        sock.sendall(_proof(secret, b"asks", ours + theirs))
        return _wire(sock, secret, ours + theirs, asks=True)
    except BaseException:
        sock.close()
        raise


def answer(sock: socket.socket, secret: bytes) -> SecureChannel:
    """Make an accepted connection a channel; raises like ``ask``, and closes it then."""
    until_s = time.monotonic() + GREETING_S
    try:
        _set_limit(sock, socket.SO_SNDTIMEO, SEND_S)
        question = _exactly(sock, len(MAGIC) + NONCE, until_s)
        _require_magic(question)
        theirs, ours = question[len(MAGIC) :], secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + ours + _proof(secret, b"answers", theirs + ours))
        if not hmac.compare_digest(_exactly(sock, PROOF, until_s), _proof(secret, b"asks", theirs + ours)):
            raise WrongSecret("the other side has another secret")
        return _wire(sock, secret, theirs + ours, asks=False)
    except BaseException:
        sock.close()
        raise


def _wire(sock: socket.socket, secret: bytes, nonces: bytes, *, asks: bool) -> SecureChannel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keys = [_proof(secret, name, nonces) for name in (b"key of who asks", b"key of who answers")]
    return SecureChannel(sock, *(keys if asks else reversed(keys)))


def _set_limit(sock: socket.socket, which: int, seconds: float) -> None:
    sock.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", int(seconds), int(1e6 * (seconds % 1))))


def _require_magic(received: bytes) -> None:
    if not received.startswith(MAGIC):
        raise OtherProtocol("the other side is no launcher of this version")


def _proof(key: bytes, *parts: bytes | memoryview) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


def _exactly(sock: socket.socket, count: int, until_s: float | None) -> bytes:
    """Read ``count`` bytes, all before the deadline."""
    received = bytearray(count)
    view, at = memoryview(received), 0
    while at < count:
        left_s = 0.0 if until_s is None else until_s - time.monotonic()
        if until_s is not None and left_s <= 0:
            raise TimeoutError("the other side takes too long")
        # Python's own time limit would hold for what another thread sends, too. Zero is none.
        _set_limit(sock, socket.SO_RCVTIMEO, max(left_s, 1e-3) if until_s is not None else 0.0)
        came = sock.recv_into(view[at:])
        if came == 0:
            raise ConnectionResetError("the other side has gone")
        at += came
    return bytes(received)
