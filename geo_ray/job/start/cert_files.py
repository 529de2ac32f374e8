"""Can the certificates of the user's own be used? Told before a cluster is started."""

from __future__ import annotations

from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.transport.security.cert_check import check_certificates
from geo_ray.transport.security.cert_store import files_of, is_revoked


def check_own_certificates(experiment: Experiment, *, goes_on: bool = False) -> None:
    """Look at what lies in `transport.certs` on this host.

    A cluster that is there has bridges on other hosts: each looks at its own region's when it
    starts.

    Args:
        experiment: the run.
        goes_on: whether it began before: a region that was shut out since may be one that it goes
            on without, so that only its bridge, if it has one, is refused.

    Raises:
        CertificateError: naming the region and the file.
    """
    transport = experiment.transport
    if transport.certs is None or transport.tls == "off" or len(experiment.regions) < 2:
        return
    directory, names = Path(transport.certs), experiment.region_names
    if experiment.cluster.kind != "local":
        names = tuple(name for name in names if Path(files_of(directory, name).cert).exists())
    if goes_on:
        names = tuple(name for name in names if not is_revoked(directory, name))
    check_certificates(directory, names)
