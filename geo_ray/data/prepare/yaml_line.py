"""Lines of a preparation file, for messages and first drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from geo_ray.data.prepare.config import Source

_PLAIN = re.compile(r"[A-Za-z_]([\w .-]*\w)?", re.ASCII)
_TAKEN = {"null", "true", "false"}


def flow(value: Any) -> str:
    """A value as YAML on one line; JSON where plain text would be misread."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TAKEN:
        return value
    return json.dumps(value, ensure_ascii=False)


def source_text(source: Source, changes: Mapping[str, Any] | None = None) -> str:
    """``{column: age, missing: mean}``: what is not the default, with some keys changed."""
    given = source.model_dump(mode="json", exclude_defaults=True)
    return flow({"column": source.column, **given, **(changes or {})})
