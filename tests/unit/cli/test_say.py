"""What commands print holds no characters that control a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import geo_ray
from geo_ray.cli.say import say, say_json

EVIL = "a\x1b[2J\x7f\x85\x9b31m\u00a0é"


def test_json_has_the_same_value_and_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_json(json.dumps({"name": EVIL}, ensure_ascii=False))
    printed = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", printed)
    assert "\u00a0é" in printed
    assert json.loads(printed) == {"name": EVIL}


def test_lines_show_the_codes_of_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    assert capsys.readouterr().out == "a\\x1b[2J\\x7f\\x85\\x9b31m\u00a0é\n"


def test_every_command_prints_json_in_this_way() -> None:
    sources = sorted((Path(geo_ray.__file__).parent / "cli").rglob("*.py"))
    direct = re.compile(r"\b(?:echo|say|print)\([^\n]*(?:model_dump_json|json\.dumps|_json\()")
    found = [path.name for path in sources if direct.search(path.read_text())]
    assert len(sources) > 30 and found == []
