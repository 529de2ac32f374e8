"""Errors of prices and plans (exit code 10)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class PlanError(GeoRayError):
    """No plan could be made, or it cannot be followed."""

    code = "PLAN"
    exit_code = 10
    chapter = "Prices and plans"
    causes = "See the codes of this chapter."
    advice = "Make a plan of this configuration with `geo-ray plan`."


class PriceBookError(PlanError):
    """A file of prices cannot be read, or a record in it contradicts itself."""

    code = "PRICES_INVALID"
    causes = (
        "A negative or missing amount, a unit that does not fit the item, tiers that do not rise, "
        "an edit by hand."
    )
    advice = "Correct what is named; docs/planning.md describes the file."


class PriceUnknownError(PlanError):
    """The plan needs a price that is in no file.

    A missing price is never taken to be 0.
    """

    code = "PRICE_UNKNOWN"
    causes = (
        "A type or a pair of regions that the shipped snapshot does not have, a cloud whose prices "
        "come from you."
    )
    advice = "Fetch it with `geo-ray prices refresh`, or add a record to your file of prices."


class CurrencyError(PlanError):
    """A price is in a currency without an exchange rate."""

    code = "CURRENCY_UNKNOWN"
    causes = "Prices of several clouds, and no rate in your file: rates change, so none is shipped."
    advice = "Add a dated exchange rate to your file of prices; docs/planning.md shows one."


class PlanInfeasibleError(PlanError):
    """No plan meets every constraint.

    The message says which one stands in the way, and what the nearest plan would be.
    """

    code = "PLAN_INFEASIBLE"
    causes = (
        "A deadline or a budget that is too tight, caps of 0, residency rules that forbid what the "
        "data's place demands. The policies that look at neither deadline nor budget are refused "
        "when their plan exceeds them."
    )
    advice = "Relax the constraint that is named."
    more = "Where the message has a number to set, it is rounded up: with it there is a plan."


class ProfileError(PlanError):
    """A profile cannot be made, read or used."""

    code = "PROFILE_INVALID"
    causes = (
        "A file that is no profile; runs too short to measure a step, or the loss of an interval; "
        "no point for a machine type that the plan may rent; plain training that diverges."
    )
    advice = "Measure anew with `geo-ray profile`."
    more = (
        "Where a region could rent several types, say which one was measured with `--machine "
        "REGION=TYPE`."
    )


class OtherModelError(PlanError):
    """A profile, a measured loss or a plan is of another model or task than the configuration's.

    The message says in what they differ.
    """

    code = "OTHER_MODEL"
    causes = (
        "Options or file of the task have changed since; for a measured loss, the data, the "
        "regions or the strategy."
    )
    advice = "Measure and plan this configuration: `geo-ray profile`, then `geo-ray plan --out`."


class ExtrapolationError(PlanError):
    """A plan needs batches or numbers of workers beyond those that were measured."""

    code = "EXTRAPOLATION"
    causes = "A profile of a small cluster, a plan for a large one."
    advice = "Measure there with `geo-ray profile`, or accept the guess with --extrapolate."
    more = "`geo-ray profile` takes `--workers` and `--batch-sizes`."
