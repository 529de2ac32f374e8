"""Settings of the transport inside a region and between regions."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from geo_ray.base.model import StrictModel
from geo_ray.transport.security.tls import TlsMode
from geo_ray.transport.wire.frames import FrameLimits

LEAST_STREAM_BYTES: Final = 16 * 1024**2
LEAST_STREAM_AGE_S: Final = 10.0


class LanConfig(StrictModel):
    """Sockets and shared memory inside a region; both ends must have the same."""

    digest_payload: bool = Field(
        default=True,
        description="Authenticate payloads as well as heads; about 0.1 ms per MB at each end.",
    )
    encrypt_payload: bool = Field(
        default=False,
        description="Encrypt payloads, which also authenticates them; about 0.25 ms per MB at "
        "each end. Heads stay readable.",
    )
    shared_memory: bool = Field(
        default=True, description="Pass tensors through memory when both ends share a host."
    )
    max_meta_bytes: int = Field(
        default=256 * 1024, gt=0, description="Largest frame meta that is accepted."
    )
    max_payload_bytes: int = Field(
        default=8 * 1024**3, gt=0, description="Largest frame payload that is accepted."
    )
    handshake_timeout_s: float = Field(
        default=10.0, gt=0, description="A connection that is not authenticated by then is closed."
    )
    max_handshakes: int = Field(
        default=32, gt=0, description="Connections that may authenticate at the same time."
    )
    ack_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A connection with bytes unacknowledged for that long is closed.",
    )

    def limits(self) -> FrameLimits:
        """Return the limits of received frames."""
        return FrameLimits(
            self.max_meta_bytes,
            self.max_payload_bytes,
            payload_digest=self.digest_payload or self.encrypt_payload,
            encrypted=self.encrypt_payload,
        )

    @property
    def protection(self) -> str:
        """Return the protection of payloads, which must be the same at both ends."""
        if self.encrypt_payload:
            return "encrypted"
        return "authenticated" if self.digest_payload else "plain"


class TransportConfig(StrictModel):
    """Connections between regions; every region must have the same."""

    heartbeat_s: float = Field(default=1.0, gt=0, description="Interval between heartbeats.")
    peer_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="A peer that is unresponsive for that long, beyond two missed heartbeats, "
        "is down.",
    )
    handshake_timeout_s: float = Field(
        default=10.0, gt=0, description="A connection that is not authenticated by then is closed."
    )
    connect_timeout_s: float = Field(
        default=10.0, gt=0, description="Timeout of a TCP connect, which is repeated every second."
    )
    reconnect_min_s: float = Field(
        default=0.05,
        gt=0,
        description="First pause between attempts to connect; it doubles with each.",
    )
    reconnect_max_s: float = Field(
        default=1.0, gt=0, description="Longest pause between attempts to connect."
    )
    send_deadline_s: float = Field(
        default=120.0, gt=0, description="Longest time that a sender waits for space in the outbox."
    )
    max_outbox_messages: int = Field(
        default=64, gt=0, description="Unacknowledged messages per peer."
    )
    max_outbox_bytes: int = Field(
        default=2 * 1024**3,
        gt=0,
        description="Bytes of unacknowledged messages per peer; a single larger message passes "
        "when nothing else waits.",
    )
    max_ahead_bytes: int = Field(
        default=256 * 1024**2,
        gt=0,
        description="Bytes per lane that are begun and not delivered, which the receiver must "
        "hold; a single larger message passes.",
    )
    max_held_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Bytes of messages from all peers that a receiver holds before their "
        "handlers are called; null: three quarters of its memory.",
    )
    chunk_bytes: int = Field(
        default=64 * 1024,
        ge=4096,
        description="Largest chunk of a message; four times as much on fast links, 16 times "
        "between processes of one host that receive it within 20 ms, at most 1 MiB.",
    )
    min_streams: int = Field(
        default=1, ge=1, le=96, description="Smallest number of data streams per pair of regions."
    )
    max_streams: int = Field(
        default=96,
        ge=1,
        le=96,
        description="Largest number of data streams per pair of regions; more are opened if "
        "they raise goodput.",
    )
    max_stream_bytes: int = Field(
        default=64 * 1024**3,
        gt=0,
        description="A stream that carried that much one way is replaced, which renews the TLS "
        "keys (safe for about 390 GB); at least 16777216.",
    )
    max_stream_age_s: float = Field(
        default=3600.0,
        gt=0,
        description="A stream of that age is replaced, which checks certificates again; at "
        "least 10.",
    )
    max_meta_bytes: int = Field(
        default=64 * 1024, gt=0, description="Largest frame meta that is accepted."
    )
    max_payload_bytes: int = Field(
        default=4 * 1024**3, gt=0, description="Largest frame payload that is accepted."
    )
    max_peers: int = Field(
        default=4096,
        gt=0,
        description="Peers of which an endpoint keeps a state; further ones are refused.",
    )
    max_handshakes: int = Field(
        default=32, gt=0, description="Connections that may authenticate at the same time."
    )
    tls: TlsMode = Field(
        default="auto",
        description="Mutual TLS 1.3. auto: unless the peer's address is loopback; required: "
        "always, for tunnels with a loopback end; off: never, for private networks.",
    )
    certs: str | None = Field(
        default=None,
        description="Directory on every bridge's host with `regions/NAME/` as written by "
        "`geo-ray certs issue`; null: the run makes its own certificates.",
    )
    congestion_control: str = Field(
        default="bbr",
        description="TCP congestion control to request; the kernel's default if it is not "
        "available.",
    )
    socket_buffer_bytes: int = Field(
        default=32 * 1024**2,
        ge=0,
        description="Socket buffers to request if the kernel's automatic size is smaller.",
    )
    advertise_host: str | None = Field(
        default=None, description="Name or IP by which other regions reach this listener."
    )

    def limits(self) -> FrameLimits:
        """Return the limits of received frames."""
        return FrameLimits(self.max_meta_bytes, self.max_payload_bytes)

    @property
    def unresponsive_after_s(self) -> float:
        """A peer that is unresponsive for longer is down."""
        return self.peer_timeout_s + 2 * self.heartbeat_s

    @model_validator(mode="after")
    def _streams_last(self) -> Self:
        if self.max_stream_bytes < LEAST_STREAM_BYTES:
            raise ValueError(
                f"max_stream_bytes: must be at least {LEAST_STREAM_BYTES} (16 MiB): "
                "heartbeats and acknowledgements alone would use the control stream up soon, and "
                "the link would be redialed again and again"
            )
        if self.max_stream_age_s < LEAST_STREAM_AGE_S:
            raise ValueError(
                f"max_stream_age_s: must be at least {LEAST_STREAM_AGE_S:g}: opening a stream "
                "takes several round trips, a second or more on a far link"
            )
        return self
