"""Export of scalars to TensorBoard files, and of hyperparameters to its HParams page."""

from __future__ import annotations

from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder, ScalarFold, TensorboardConfig


class TensorboardExporter:
    """See `Exporter`.

    Args:
        config: directory of the files.
        order: the run.
    """

    def __init__(self, config: TensorboardConfig, order: ExportOrder) -> None:
        where = order.run_dir / "tensorboard"
        if config.dir is not None:
            where = order.base_dir / config.dir
        self._writer = SummaryWriter(str(where), flush_secs=5)
        self._fold = ScalarFold(config.every_s)
        self._origin_unix_s = order.origin_unix_s
        _, self._session_start, self._session_end = hparams(dict(order.hyperparameters), {})

    def feed(self, event: Event) -> None:
        """See `Exporter.feed`."""
        if event.kind == "run_started":
            self._writer.file_writer.add_summary(self._session_start)
        elif event.kind == "run_finished":
            self._writer.file_writer.add_summary(self._session_end)
        for each in self._fold.feed(event):
            at_unix_s = self._origin_unix_s + each.t_s
            self._writer.add_scalar(each.name, each.value, each.step, at_unix_s)

    def flush(self) -> None:
        """See `Exporter.flush`."""
        self._writer.flush()

    def close(self) -> None:
        """See `Exporter.close`."""
        self._writer.close()
