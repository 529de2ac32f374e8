"""Errors of the user's task (exit code 4)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class TaskError(GeoRayError):
    """Something is wrong with the task, that is with the user's code."""

    code = "TASK"
    exit_code = 4
    chapter = "Task"
    causes = "See the codes of this chapter."
    advice = "Mend the part of the task that the message names."


class TaskLoadError(TaskError):
    """The task does not import, lacks something that a task must have, or refuses an option."""

    code = "TASK_LOAD"
    causes = (
        "A misspelt file, module, class or option, an import that fails on this machine, a missing "
        "method, columns of an unknown type."
    )
    advice = "Mend what the message names; docs/tasks.md says what a task must define."
    more = (
        "The message names the nearest valid name. For a wrong option it lists the options of the "
        "task with their types and defaults; for a file that fails while it is imported it names "
        "the line."
    )


class TaskOutputError(TaskError):
    """The task's model, loss or evaluation has the wrong form."""

    code = "TASK_OUTPUT"
    causes = (
        "A loss that is a vector, an integer or detached from the parameters; an evaluation that "
        "does not return one-dimensional float64 sums; a model whose parameters are not fp32, "
        "have no shape yet, share memory or cannot be saved; a loss that a GradScaler scales; an "
        "exception in a method."
    )
    advice = "Mend what the message names; the loss is a scalar that depends on the parameters."
    more = "`evaluate` returns sums over the rows of a batch; docs/tasks.md has an example of each."


class TaskStateError(TaskError):
    """Values of the model that are not trained change, or differ between processes."""

    code = "TASK_STATE"
    causes = (
        "A moving average of the weights, a queue, a codebook or spectral normalisation that the "
        "task does not declare; a pattern of `carry` or `groups` that fits nothing; a frozen part "
        "that is read from different files on different machines; carried values where updates are "
        "summed on their way; a loss that computes with other parameters than those that are "
        "trained; `requires_grad` switched in the first steps."
    )
    advice = "Declare what changes in the task's `carry`; docs/tasks.md has the rules."
    more = (
        "What changes in the forward pass without a gradient is exchanged between regions, saved "
        "in checkpoints and in the model only if the task names it. The message names it."
    )


class OwnCodeError(TaskError):
    """A strategy or codec of the user's raised an exception."""

    code = "OWN_CODE"
    causes = (
        "A mistake in the class that `strategy.use` or `codec.*.use` names: an attribute that is "
        "not there, tensors of two shapes, a case that was not thought of."
    )
    advice = "Mend the named line; `geo-ray check FILE.py:CLASS` shows most such mistakes."
    more = "The message names the class, the method and the line; docs/own.md says what each does."


class NonFiniteError(TaskError):
    """A loss, gradient or update is NaN or infinite.

    It was refused before it changed any parameter.
    """

    code = "NON_FINITE"
    causes = (
        "A learning rate that is too high, missing gradient clipping, a logarithm or division of "
        "zero, bad samples. The run ends only after several refusals in a row; each is a "
        "`step_refused` event."
    )
    advice = (
        "Lower `optimizer.lr` or clip gradients: `geo-ray train --resume RUN "
        "--set train.clip_norm=1.0`."
    )
    more = (
        "If single samples are bad, take them out of the data: the `step_refused` events name the "
        "region and the step."
    )
