"""What to say where a configuration has no section `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from geo_ray.errors import ConfigError

# Of the shipped prices: places with such machines, and what leaves them.
_AT = ("us-east-1", "eu-west-1", "ap-south-1", "us-west-2", "eu-central-1", "ap-northeast-1")


def no_plan_section(regions: Sequence[str]) -> ConfigError:
    """The error, with the smallest section that can be planned with.

    Args:
        regions: names of the run's regions.
    """
    lines = ["plan:", "  regions:"]
    for name, at in zip(regions, _places(regions), strict=True):
        machines = "[{type: g5.xlarge, cap: 4, rows_per_s: 100}]"
        lines.append(f"    {name}: {{cloud: aws, at: {at}, machines: {machines}}}")
    example = "\n         ".join(lines)
    return ConfigError(
        "the configuration has no section 'plan'",
        fix="Say there what could be rented where (docs/planning.md has every key), such as\n"
        f"         {example}",
    )


def _places(regions: Sequence[str]) -> list[str]:
    """A place of the cloud for each: the one of its name, else one that no other has, if any."""
    named = [next((at for at in _AT if at.startswith(name)), None) for name in regions]
    others = cycle([at for at in _AT if at not in named] or _AT)
    return [next(others) if at is None else at for at in named]
