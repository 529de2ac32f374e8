"""Machines and egress of a cluster at the prices of a price book.

A region has machines of one type, on demand and on the spot market, and traffic to the others costs
what the book says of that pair. Accelerators and memory are those known of the type; cores and disk
are not, and taken to be one for 4 GB of memory, and 400 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from geo_ray.clouds.instances import instance_of
from geo_ray.clouds.price_book import PriceBook
from geo_ray.errors import PriceUnknownError, ScheduleInputError
from geo_ray.scheduling.load.generate import RegionOffers

_GB_PER_CORE: Final = 4.0
_DISK_GB: Final = 400.0


def book_offers(book: PriceBook, machine: str, regions: Sequence[str]) -> RegionOffers:
    """Return what regions offer.

    Args:
        book: the prices.
        machine: cloud and type, as in ``aws:p4d.24xlarge``.
        regions: of the cloud.

    Raises:
        ScheduleInputError: nothing is known of the type, or a region is there twice.
        PriceUnknownError: a price is not known.
    """
    cloud, _, type_ = machine.partition(":")
    known = instance_of(cloud, type_)
    if known.accelerators is None or known.host_gb is None:
        raise ScheduleInputError(
            f"nothing is known of machines '{machine}'",
            fix="Name cloud and type, as in aws:p4d.24xlarge; `geo-ray prices` lists types.",
        )
    if not regions or len(set(regions)) < len(regions):
        raise ScheduleInputError("no region is named, or one of them twice")
    usd = [book.usd_of_hours(book.instance(cloud, name, type_), 1.0) for name in regions]
    spot = [
        _spot_usd(book, cloud, name, type_, dear) for name, dear in zip(regions, usd, strict=True)
    ]
    egress = np.array(
        [
            [0.0 if a == b else book.usd_of_volume(book.egress(cloud, a, b), 1.0) for b in regions]
            for a in regions
        ]
    )
    machine_R = (float(known.accelerators), known.host_gb / _GB_PER_CORE, known.host_gb, _DISK_GB)
    return RegionOffers(tuple(regions), machine_R, np.array(usd), np.array(spot), egress)


def _spot_usd(book: PriceBook, cloud: str, region: str, type_: str, dear: float) -> float:
    """Return the price of the spot market; that on demand where it has none."""
    try:
        return book.usd_of_hours(book.instance(cloud, region, type_, "spot"), 1.0)
    except PriceUnknownError:
        return dear
