"""`geo-ray program`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import ProgramInvalidError, ProgramLoadError
from geo_ray.cli.main import root
from tests.support.program_support import EXAMPLE, MEANS

QUICKSTART = EXAMPLE.parents[1] / "configs" / "quickstart.yaml"


def called(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["program", *arguments])


def test_graph_simulation_and_price_of_the_example() -> None:
    graph = called(str(EXAMPLE), "--graph").stdout
    assert "  means -> rows-east   [eu-west => us-east, 50 Mbit/s, 40 ms]\n" in graph
    told = json.loads(called(f"{EXAMPLE}:program", "--simulate", "--json").stdout)
    assert told["values"] == {"means": MEANS}
    assert told["on"] == "virtual"
    assert told["traffic"][0]["request_bytes"] == 32
    cost = json.loads(called(str(EXAMPLE), "--price", "--json").stdout)
    assert cost["seconds"] == told["seconds"]
    assert cost["cross_region_bytes"]["eu-west => us-east"] == 32 + 8 * 256
    assert cost["usd"] == pytest.approx(
        sum(cost["machines_usd"].values()) + sum(cost["egress_usd"].values())
    )
    text = called(str(EXAMPLE), "--on", "threads").output
    assert "means -> rows-west: 8 calls, 32 B there, 128 B back   [eu-west => us-west]" in text


def test_a_configuration_is_a_program() -> None:
    graph = called(str(QUICKSTART), "--graph", "--set", "name=other").stdout
    assert graph.startswith("program other\n")
    assert "bridge-us-east -> averager   [us-east => eu-west, 100 Mbit/s, 30 ms]" in graph


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "--price"], "mutually exclusive"),
        (["--set", "a=b"], "--set requires a CONFIG.yaml"),
        (["--on", "moon"], "is not one of"),
        (["--logs", "here"], "--logs requires --on processes"),
    ],
)
def test_mistakes_of_usage(arguments: list[str], message: str) -> None:
    result = called(str(EXAMPLE), *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1", "", "has 0 programs instead of one: none"),
        ("{p}\na, b = make(), make()", "", "has 2 programs instead of one: a, b"),
        ("{p}\nabc = make()", ":acb", "has no program 'acb'; did you mean 'abc'?"),
        ("x = 1", ":x", "x of p.py is not a program, but int"),
        ("def f(): return 3", ":f", "f of p.py is not a program, but int"),
        ("def f(): raise KeyError('k')", ":f", "p.py:1: f(): KeyError: 'k'"),
        ("1/0", "", "p.py:1 failed while it was imported: ZeroDivisionError"),
    ],
)
def test_files_without_a_program(tmp_path: Path, text: str, name: str, message: str) -> None:
    make = (
        "from geo_ray import *\nfrom geo_ray.program.graph import NodeGroup, Program, ProgramNode\n"
        "def make(): return Program('p', (NodeGroup('eu', (ProgramNode('a', dict),)),))"
    )
    (tmp_path / "p.py").write_text(text.replace("{p}", make))
    result = called(f"{tmp_path / 'p.py'}{name}")
    assert isinstance(result.exception, ProgramLoadError)
    assert message in str(result.exception)


def test_a_function_of_the_file_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "from geo_ray.program.graph import NodeGroup, Program, ProgramNode\n"
        "def made(): return Program('made', (NodeGroup('eu', (ProgramNode('a', dict),)),))\n"
    )
    assert called(f"{tmp_path / 'p.py'}:made", "--graph").stdout == "program made\n  eu\n    a\n"
    for where in ("q.py", "p.txt"):
        assert isinstance(called(str(tmp_path / where)).exception, ProgramLoadError)


def test_what_geo_ray_says_of_a_file_is_said_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("from geo_ray.program.graph import Program\nProgram('p', ())")
    assert isinstance(called(str(tmp_path / "p.py")).exception, ProgramInvalidError)


def test_a_line_says_what_is_read_before_anything_is_imported(tmp_path: Path) -> None:
    where = str(tmp_path / "q.py")
    assert called(where).stderr == f"reading {where}\n"
