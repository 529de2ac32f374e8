"""Errors of searches for better hyperparameters (exit code 13)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class TuningError(GeoRayError):
    """A search could not be made, or nothing came of it."""

    code = "TUNING"
    exit_code = 13
    chapter = "Tuning"
    causes = "See the codes of this chapter."
    advice = "Read the message; the directory of the search has the results of every trial."


class SearchMissingError(TuningError):
    """The search algorithm that was asked for is not installed."""

    code = "SEARCH_MISSING"
    causes = "`search: {kind: optuna}` or `{kind: hyperopt}` without that package."
    advice = "Install it, `pip install 'geo_ray[search]'`, or take `search: {kind: random}`."


class TrialsFailedError(TuningError):
    """All trials failed: there is no best one.

    The message has what the first of them ended with.
    """

    code = "TRIALS_FAILED"
    causes = (
        "Learning rates with which every run diverges, a space in which no values go together, a "
        "task or data that cannot be loaded."
    )
    advice = "Train the base configuration by itself first; then narrow the space."


class TuningDirectoryError(TuningError):
    """The directory of a search cannot be used: it is there already, or it holds another search.

    Nothing in it was changed.
    """

    code = "TUNING_DIRECTORY"
    causes = (
        "A second search of the same name; `--resume` of a search whose base, space or objectives "
        "have changed since, or of a directory that is no search."
    )
    advice = "Go on with it by `--resume`, or name another directory with `--out`."
