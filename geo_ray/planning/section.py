"""What to say where a configuration has no section `plan`."""

from __future__ import annotations

from collections.abc import Sequence

from geo_ray.errors import ConfigError


def no_plan_section(regions: Sequence[str]) -> ConfigError:
    """The error, with the smallest section that can be planned with.

    Args:
        regions: names of the run's regions.
    """
    offer = "{cloud: aws, at: us-east-1, machines: [{type: g5.xlarge, cap: 4, rows_per_s: 100}]}"
    lines = ["plan:", "  regions:", *(f"    {name}: {offer}" for name in regions)]
    example = "\n         ".join(lines)
    return ConfigError(
        "the configuration has no section 'plan'",
        fix="Say there what could be rented where (docs/planning.md has every key), such as\n"
        f"         {example}",
    )
