"""Callbacks that join a run from a `transformers.Trainer` or a `lightning.Trainer`.

A callback begins the training of a `JoinedRegion` when the trainer has wrapped the model, counts
each optimizer step, and stops the trainer when the run is over::

    with geo_ray.join(address, region="eu", credentials="eu.pem") as site:
        Trainer(model, args, train_dataset=rows, callbacks=[trainer_callback(site)]).train()

Neither library is imported before its function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from geo_ray.base.errors import LoopMisuseError
from geo_ray.joining.site import JoinedRegion, JoinedTraining


class _Counted:
    """A region's training in a trainer that another library runs.

    Args:
        site: the region.
        trainer: name of the trainer, for messages.
        checkpoints: folder of the region's checkpoints; None: none are written.
    """

    def __init__(self, site: JoinedRegion, trainer: str, checkpoints: str | Path | None) -> None:
        self._site, self._trainer, self._checkpoints = site, trainer, checkpoints
        self._sync: JoinedTraining | None = None

    def begin(
        self, model: nn.Module, state: Mapping[str, Any], planned: int | None, fix: str
    ) -> None:
        """Begin the training with a model in its final, wrapped form.

        Args:
            model: the model.
            state: the trainer's optimizer and schedule.
            planned: optimizer steps after which the trainer ends; None: unknown.
            fix: what to change if they are too few.

        Raises:
            LoopMisuseError: the trainer would end before the run does.
            GeoRayError: the run does not accept the model.
        """
        folder = self._checkpoints
        saved = {} if folder is None else {k: v for k, v in state.items() if v is not None}
        sync = self._sync = self._site.begin(model, state=saved, checkpoints=folder)
        left = sync.remaining_steps
        if planned is not None and left is not None and planned < left:
            raise LoopMisuseError(
                f"{self._trainer} would end after {planned} of the {left} steps of the run",
                fix=fix.format(steps=left),
            )

    def step(self, rows: int, loss: Tensor | float | None) -> bool:
        """Count an optimizer step; return whether the run is over."""
        if self._sync is None:
            raise LoopMisuseError(f"{self._trainer} steps outside of its training")
        self._sync.step(rows, loss)
        if not self._sync.done:
            return False
        self._site.finish()  # before the trainer changes the model, as by loading the best one
        self._sync = None
        return True

    def end(self) -> None:
        """Refuse a trainer that ends before the run does."""
        if self._sync is not None:
            self._site.finish()


def trainer_callback(site: JoinedRegion, checkpoints: str | Path | None = None) -> Any:
    """Return a `transformers.TrainerCallback` that joins a run.

    The rows of a step are the batch size of the device times the accumulated batches, also at the
    end of an epoch, where they may be fewer. Losses are those that the trainer logs.

    Args:
        site: the region; its ``group`` must be that of the trainer.
        checkpoints: folder for the region's checkpoints, see `JoinedRegion.training`; they contain
            the trainer's optimizer and schedule. None: none are written.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class GeoRayCallback(TrainerCallback):  # type: ignore[misc]  # the base is not typed
        """Joins a run; see `trainer_callback`."""

        def __init__(self) -> None:
            self._counted = _Counted(site, "the Trainer", checkpoints)
            self._loss: float | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin the training."""
            if args.deepspeed:
                raise _no_deepspeed()
            planned = state.max_steps - state.global_step
            optimizer, schedule = kwargs.get("optimizer"), kwargs.get("lr_scheduler")
            own = {"optimizer": getattr(optimizer, "optimizer", optimizer), "schedule": schedule}
            self._counted.begin(
                kwargs["model"], own, planned, "Set max_steps={steps} in the TrainingArguments."
            )

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Count a step, unless the optimizer has skipped it because of an overflow."""
            if getattr(kwargs["optimizer"], "step_was_skipped", False):
                return
            loss, self._loss = self._loss, None
            rows = args.train_batch_size * args.gradient_accumulation_steps
            if self._counted.step(rows, loss):
                control.should_training_stop = True

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            """Keep the logged loss for the next step."""
            if logs and "loss" in logs:
                self._loss = float(logs["loss"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Refuse an early end."""
            self._counted.end()

    return GeoRayCallback()


def lightning_callback(site: JoinedRegion, checkpoints: str | Path | None = None) -> Any:
    """Return a `lightning.pytorch.Callback` that joins a run.

    The module must use automatic optimization with one optimizer. The rows of a step are the sizes
    of its batches as Lightning determines them.

    Args:
        site: the region; its ``group`` must be that of the trainer.
        checkpoints: folder for the region's checkpoints, see `JoinedRegion.training`; they contain
            the trainer's optimizer and schedule. None: none are written.

    Raises:
        ModuleNotFoundError: lightning is not installed.
    """
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.data import extract_batch_size

    class GeoRayCallback(Callback):  # type: ignore[misc]  # the base is not typed
        """Joins a run; see `lightning_callback`."""

        def __init__(self) -> None:
            self._counted = _Counted(site, "the Trainer", checkpoints)
            self._steps = self._rows = 0
            self._loss: Tensor | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Begin the training."""
            if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
                raise LoopMisuseError(
                    "the module optimizes manually, or with several optimizers",
                    fix="Call `sync.step` of `site.training(model)` in the module instead.",
                )
            if "DeepSpeed" in type(trainer.strategy).__name__:
                raise _no_deepspeed()
            self._steps = trainer.global_step
            planned = None if trainer.max_steps < 0 else trainer.max_steps - self._steps
            own = {"optimizer": trainer.optimizers[0]}
            own |= {
                f"schedule-{i}": each.scheduler
                for i, each in enumerate(trainer.lr_scheduler_configs)
            }
            self._counted.begin(pl_module, own, planned, "Set max_steps={steps} in the Trainer.")

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            """Count a step, if this batch ends one."""
            self._rows += extract_batch_size(batch)
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:  # divided by the number of accumulated batches
                self._loss = loss.detach() + (0.0 if self._loss is None else self._loss)
            if trainer.global_step == self._steps:
                return
            self._steps = trainer.global_step
            rows, loss = self._rows, self._loss
            self._rows, self._loss = 0, None
            if self._counted.step(rows, loss):
                trainer.should_stop = True

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Refuse an early end."""
            self._counted.end()

    return GeoRayCallback()


def _no_deepspeed() -> LoopMisuseError:
    return LoopMisuseError(
        "DeepSpeed keeps copies of the parameters in its optimizer, which would undo each exchange",
        fix="Use DistributedDataParallel or FSDP2.",
    )
