"""Clusters at the prices of a price book."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import PriceUnknownError, ScheduleInputError
from geo_ray.prices.price_book import bundled_book
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.workload import LoadShape, book_offers, generated_cluster, generated_jobs

MACHINE, AT = "aws:p4d.24xlarge", ("us-east-1", "eu-west-1")


def test_a_whole_machine_costs_what_the_book_says() -> None:
    book = bundled_book()
    offers = book_offers(book, MACHINE, AT)
    cluster = generated_cluster(LoadShape(8, 4, 10, spot_fraction=0.5), 1, offers)
    assert cluster.net.names == AT
    for number, site in enumerate(cluster.sites):
        per_h = float(cluster.usd_per_h_TSR[0, number] @ cluster.capacity_TSR[0, number])
        price = book.instance("aws", AT[site.region], "p4d.24xlarge")
        if not site.spot:
            assert per_h == pytest.approx(book.usd_of_hours(price, 1.0))
        else:
            assert per_h < book.usd_of_hours(price, 1.0)
    there = book.usd_of_volume(book.egress("aws", *AT), 1.0)
    assert cluster.net.usd_per_gb_GG[0, 1] == pytest.approx(there)
    assert cluster.net.usd_per_gb_GG[0, 0] == 0.0
    shape = LoadShape(10, 10, regions=2, spot_fraction=0.3)
    cluster = generated_cluster(shape, 0, offers)
    done = replay_jobs(cluster, generated_jobs(shape, 0), PdOrsPolicy())
    check_schedule(done)
    assert done.uses


@pytest.mark.parametrize("machine", ["p4d.24xlarge", "aws:x99", "moon:rover"])
def test_unknown_machine_types_are_rejected(machine: str) -> None:
    with pytest.raises(ScheduleInputError, match="unknown machine type"):
        book_offers(bundled_book(), machine, AT)


def test_unknown_and_repeated_regions_are_rejected() -> None:
    with pytest.raises(PriceUnknownError):
        book_offers(bundled_book(), MACHINE, ("us-east-1", "atlantis"))
    with pytest.raises(ScheduleInputError, match="twice"):
        book_offers(bundled_book(), MACHINE, ("us-east-1", "us-east-1"))
