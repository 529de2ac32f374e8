"""Errors of prices and plans (exit code 10) and of clouds (11)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class PlanError(GeoRayError):
    """Root of everything that keeps a plan from being made or followed."""

    code = "PLAN"
    exit_code = 10


class PriceBookError(PlanError):
    """A file of prices cannot be used."""

    code = "PRICES_INVALID"
    advice = "Correct what is named; docs/planning.md describes the file."


class PriceUnknownError(PlanError):
    """Something has no known price; it is never taken to be free."""

    code = "PRICE_UNKNOWN"
    advice = "Fetch it with `geo-ray prices refresh`, or add a record to your file of prices."


class CurrencyError(PlanError):
    """A price is in a currency without an exchange rate."""

    code = "CURRENCY_UNKNOWN"
    advice = "Add a dated exchange rate to your file of prices; docs/planning.md shows one."


class PlanInfeasibleError(PlanError):
    """No plan meets every constraint."""

    code = "PLAN_INFEASIBLE"
    advice = "Relax the constraint that is named; the message has the nearest plan."


class ProfileError(PlanError):
    """A profile cannot be made, read or used."""

    code = "PROFILE_INVALID"
    advice = "Measure anew with `geo-ray profile`."


class OtherModelError(PlanError):
    """A profile or a plan was made for another model."""

    code = "OTHER_MODEL"
    advice = "Measure and plan this configuration: `geo-ray profile`, then `geo-ray plan --out`."


class ExtrapolationError(PlanError):
    """A plan needs batches or numbers of workers beyond what was measured."""

    code = "EXTRAPOLATION"
    advice = "Measure there with `geo-ray profile`, or accept the guess with --extrapolate."


# ------------------------------------------------------------------ clouds (11)


class CloudError(GeoRayError):
    """A cloud refused a request, or its answer makes no sense."""

    code = "CLOUD"
    exit_code = 11
    advice = "Read what the cloud said; credentials and regions are the usual causes."


class CloudUnreachableError(CloudError):
    """A cloud did not answer, or only asked to slow down, until the last try."""

    code = "CLOUD_UNREACHABLE"
    advice = "Try again later, or check the network and the endpoint."
