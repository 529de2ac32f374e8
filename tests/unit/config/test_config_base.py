"""The base of options of tasks, under its name and the one it had."""

from __future__ import annotations

import pytest

from geo_ray.config import base


def test_the_name_that_older_tasks_import_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="geo_ray.Options"):
        from geo_ray.config.base import Model

    assert Model is base.StrictModel


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        _ = base.Modell
