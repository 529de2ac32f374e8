"""Errors between processes and regions (exit code 6)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class TransportError(GeoRayError):
    """Something is wrong between processes or regions."""

    code = "TRANSPORT"
    exit_code = 6
    chapter = "Wide-area network"
    causes = "See the codes of this chapter."
    advice = "Check the address and the network that the message names."


class FrameError(TransportError):
    """Received bytes are no valid frame.

    They were dropped before anything was decoded.
    """

    code = "FRAME_INVALID"
    causes = (
        "Another program talks to the port, the two ends run different releases, memory or a "
        "network device corrupts data."
    )
    advice = "Check that both ends run the same release and nothing else talks to this port."


class PeerRefusedError(TransportError):
    """The peer belongs to another run, speaks another protocol version or has no valid key."""

    code = "PEER_REFUSED"
    causes = (
        "A process of an earlier run that is still alive, a mixture of releases, a forged or "
        "stolen address, a certificate that expired or was revoked."
    )
    advice = "End processes of earlier runs, and start all regions from one release."


class CertificateError(TransportError):
    """A certificate or private key on this side cannot be read, written or used."""

    code = "CERTIFICATE_INVALID"
    causes = (
        "A missing or unreadable file, a key that belongs to another certificate, an encrypted "
        "key, an expired CA, a file that exists already and would have been replaced, a revocation "
        "list that the deployment's CA has not signed, a CA whose replacing is ended too early; at "
        "the start of a run, a certificate in `transport.certs` that another region would not "
        "take. A "
        "certificate of the *other* side that is refused is a `PEER_REFUSED`."
    )
    advice = "Issue or renew it: `geo-ray certs show DIR` lists what a deployment has."


class LinkDownError(TransportError):
    """A peer could not be reached before the deadline."""

    code = "LINK_DOWN"
    causes = "A route, firewall or security group between the regions, an outage, a dead machine."
    advice = (
        "Check routes and firewalls between the two regions; a run can be resumed from its "
        "checkpoint."
    )
    more = "The bridge's port must be open from the other region."


class LinkUnknownError(TransportError):
    """The link table has no record of a pair of regions that is needed."""

    code = "LINK_UNKNOWN"
    causes = (
        "A region that was added after the probe, a probe of that pair that failed, a table of "
        "another deployment, records that were too old to be used."
    )
    advice = "Measure it with `geo-ray probe`, or name a link table that has the pair."
    more = (
        "`geo-ray probe` takes the configuration, or runs between two hosts, and writes "
        "`links.json`."
    )


class ReferenceLostError(TransportError):
    """An update is a difference from an answer that the averager does not remember."""

    code = "REFERENCE_LOST"
    causes = (
        "The averager was replaced by one that had not seen that answer. The sender repeats the "
        "update in full, so this code appears in logs only."
    )
    advice = "Do nothing: the sender hears of it and sends the same update in full."
    more = "If it is logged at every exchange, report it with the run directory."


class DeadlineExceededError(TransportError):
    """A wait reached its deadline.

    Waits for machines and links have one; waits for others' training only with
    `train.step_timeout_s`.
    """

    code = "DEADLINE_EXCEEDED"
    causes = "Work that is slower than the deadline allows, or a process that is frozen."
    advice = (
        "Raise the named deadline if the work is really that slow; otherwise look for what hangs."
    )
