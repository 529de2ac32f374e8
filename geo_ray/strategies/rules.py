"""What a strategy asks of the regions of a configuration."""

from __future__ import annotations

from collections.abc import Mapping

from geo_ray.strategies.base import Strategy


def check_shards(strategy: Strategy, shards: Mapping[str, int]) -> None:
    """Refuse regions whose model is cut, if the strategy needs it in one piece.

    Args:
        strategy: the run's.
        shards: of the parameter server, by region.

    Raises:
        ValueError: naming the key.
    """
    cut = [region for region, count in shards.items() if count > 1]
    if strategy.traits.region.whole_model and cut:
        raise ValueError(
            f"regions: strategy '{strategy.kind}' needs a model in one piece: set ps_shards: 1 in "
            f"{', '.join(cut)}"
        )
