"""`geo-ray prices refresh`: ask, keep what was read, and say what was not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from geo_ray.cli.tables.prices import age_text
from geo_ray.clouds.price import PriceRecord
from geo_ray.clouds.price_book import PriceBook, dump_book, known_book, load_book, own_files
from geo_ray.clouds.query import Query, QueryResult, answer_to
from geo_ray.errors import CloudError, PriceBookError
from geo_ray.util.atomic_file import write_atomic


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be asked.

    Attributes:
        cloud: which.
        regions: of it; none: those with known prices.
        types: of instances; none: those with a known price in the region.
        endpoints: as `geo_ray.clouds.endpoints.parse_endpoints` takes them.
        currency: that Tencent bills in, if it was said.
        tries: per call.
    """

    cloud: str
    regions: tuple[str, ...]
    types: tuple[str, ...]
    endpoints: tuple[str, ...]
    currency: str | None
    tries: int


def refresh_prices(wanted: Wanted, target: Path) -> None:
    """Ask, and write what was read to ``target``, also when it ends early.

    Raises:
        CloudError: nothing at all could be read.
        PriceBookError: a file of prices is not valid, or cannot be written.
    """
    others = [path for path in own_files() if path != target]
    before = known_book([*others, *([target] if target.exists() else [])])
    types = _types_by_region(wanted, before)
    try:
        queries = _queries(wanted, types)
    except CloudError:  # of the credentials: nobody was asked
        known = [r for r in before.records if r.cloud == wanted.cloud and r.region in types]
        click.echo(_kept_text(known, time.time()), err=True)
        raise
    answers: list[QueryResult] = []
    try:
        _ask_all(queries, answers)
    finally:
        if any(answer.records for answer in answers):
            _write(answers, target)
    _tell(answers, before, target)


def _types_by_region(wanted: Wanted, book: PriceBook) -> dict[str, tuple[str, ...]]:
    known = [r for r in book.records if r.cloud == wanted.cloud and r.item == "instance"]
    regions = wanted.regions or tuple(sorted({record.region for record in known}))
    if not regions:
        raise click.UsageError(f"no price of {wanted.cloud} is known yet; name --regions")
    found = {}
    for region in regions:
        there = sorted({str(record.type) for record in known if record.region == region})
        found[region] = wanted.types or tuple(there)
        if not found[region]:
            raise click.UsageError(
                f"no price of {wanted.cloud} in {region} is known yet; name --types"
            )
    return found


def _queries(wanted: Wanted, types: dict[str, tuple[str, ...]]) -> list[Query]:
    from geo_ray.clouds.endpoints import parse_endpoints

    if wanted.cloud == "aws":
        from geo_ray.clouds.aws.queries import SERVICES as AWS_SERVICES
        from geo_ray.clouds.aws.queries import aws_queries
        from geo_ray.clouds.aws.session import Aws

        endpoints = parse_endpoints(wanted.endpoints, AWS_SERVICES)
        return aws_queries(Aws(endpoints, attempts=wanted.tries), types)
    from geo_ray.clouds.tencent.queries import SERVICES as TENCENT_SERVICES
    from geo_ray.clouds.tencent.queries import tencent_queries
    from geo_ray.clouds.tencent.session import Tencent

    endpoint = parse_endpoints(wanted.endpoints, TENCENT_SERVICES).get("cvm")
    if wanted.currency is None and "intl" in (endpoint or ""):
        raise click.UsageError("name the --currency: accounts of that site may not pay in CNY")
    tencent = Tencent(endpoint, attempts=wanted.tries)
    return tencent_queries(tencent, types, wanted.currency or "CNY")


def _ask_all(queries: Sequence[Query], answers: list[QueryResult]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(queries))
        for query in queries:
            progress.update(bar, description=query.what)
            answers.append(answer_to(query))
            progress.advance(bar)


def _write(answers: Sequence[QueryResult], target: Path) -> None:
    fresh = [record for answer in answers for record in answer.records]
    try:
        # Read again: another refresh may have written meanwhile.
        old = load_book(target) if target.exists() else PriceBook()
        write_atomic(target, dump_book(old.renewed(fresh)))
    except OSError as error:
        raise PriceBookError(
            f"prices {target} cannot be written: {error.strerror or error}",
            fix="Name another file with --file.",
        ) from None


def _tell(answers: Sequence[QueryResult], before: PriceBook, target: Path) -> None:
    now = time.time()
    for answer in answers:
        if answer.error is not None:
            click.secho(
                f"{answer.query.what} was not read: {answer.error.message}", fg="red", err=True
            )
            click.secho(f"  {_kept_text(answer.query.known(before), now)}", fg="red", err=True)
        if answer.missing:
            click.echo(f"{answer.query.what}: no price of {', '.join(answer.missing)}", err=True)
    count = sum(len(answer.records) for answer in answers)
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors and not count:
        raise CloudError(
            f"no price was read, {target} is as it was; {errors[0].message}", fix=errors[0].fix
        )
    click.echo(
        f"prices   {target}, {count} read" + (f", {len(errors)} questions failed" if errors else "")
    )


def _kept_text(kept: Sequence[PriceRecord], now: float) -> str:
    if not kept:
        return "no older price is known"
    old = age_text(max(record.age_s(now) for record in kept))
    stale = sum(record.is_stale(now) for record in kept)
    prices = "1 older price stays" if len(kept) == 1 else f"{len(kept)} older prices stay"
    return f"{prices}, the oldest {old} old, {stale} stale"
