"""The contract suite behind `geo-ray check`: checks of any strategy, codec or task."""
