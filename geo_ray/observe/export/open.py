"""Makes the exporters that a configuration asks for."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from geo_ray.errors import ConfigError
from geo_ray.observe.events.schema import Event
from geo_ray.observe.export.config import AnyExport
from geo_ray.observe.export.exporter import Exporter, ExportOrder
from geo_ray.observe.export.pump import ExportPump
from geo_ray.observe.report.ending import failure_fields

_WHERE: Final = {
    "otlp": ("OtlpExporter", "opentelemetry-exporter-otlp-proto-http"),
    "tensorboard": ("TensorboardExporter", "tensorboardX"),
    "mlflow": ("MlflowExporter", "mlflow-skinny"),
    "wandb": ("WandbExporter", "wandb"),
}


def check_exports(configs: Sequence[AnyExport]) -> None:
    """Refuse what cannot be told of for want of a package, before anything is started.

    Raises:
        ConfigError: naming the package.
    """
    for config in configs:
        _class_of(config.kind)


def open_exporters(configs: Sequence[AnyExport], order: ExportOrder) -> dict[str, Exporter]:
    """Make the exporters, by a name for people.

    Raises:
        ConfigError: a package is missing, or an exporter cannot be made.
    """
    found: dict[str, Exporter] = {}
    for number, config in enumerate(configs):
        name = config.kind if config.kind not in found else f"{config.kind} {number}"
        kind = _class_of(config.kind)
        try:
            found[name] = kind(config, order)
        except Exception as error:  # of another's program
            for made in found.values():
                made.close()
            raise ConfigError(
                f"observe.export: {config.kind} cannot be begun: {error}",
                fix="Mend what it says, or take it out of `observe.export`.",
            ) from error
    return found


@contextmanager
def exporting(configs: Sequence[AnyExport], order: ExportOrder) -> Iterator[ExportPump]:
    """Hand events on during a block; of an error that ends it, that it has failed.

    Raises:
        ConfigError: as for `open_exporters`.
    """
    pump = ExportPump(open_exporters(configs, order))
    try:
        yield pump
    except BaseException as error:
        t_s = time.time() - order.origin_unix_s
        pump.feed(Event("run_failed", t_s, failure_fields(error)))
        raise
    finally:
        pump.close()


def _class_of(kind: str) -> type:
    name, package = _WHERE[kind]
    try:
        module = importlib.import_module(f"geo_ray.observe.export.{kind}")
    except ImportError as error:
        raise ConfigError(
            f"observe.export: {kind} needs a package that is not installed: {error}",
            fix=f"Install {package}, or geo_ray with its extra `export`.",
        ) from error
    found: type = getattr(module, name)
    return found
