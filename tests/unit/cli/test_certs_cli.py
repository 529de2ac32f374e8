"""`geo-ray certs`: every verb takes the directory both ways, and what it advises can be typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import CertificateError, GeoRayError
from geo_ray.cli.main import root


def run(*words: str) -> Result:
    return CliRunner().invoke(root, ["certs", *words])


def done(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def advised(text: str) -> list[list[str]]:
    """The commands that a text names, as somebody would type them."""
    return [shlex.split(line) for line in re.findall(r"`geo-ray certs ([^`]+)`", text)]


def error(*words: str) -> GeoRayError:
    found = run(*words).exception
    assert isinstance(found, CertificateError), found
    return found


@pytest.fixture
def home(tmp_path: Path) -> str:
    """With a blank in it, as paths may have."""
    return str(tmp_path / "my deployment")


@pytest.mark.parametrize("form", [[], ["--dir"]])
def test_every_verb_takes_the_directory_both_ways(form: list[str], home: str) -> None:
    for words in (
        ["init"], ["issue", "eu"], ["issue", "us"], ["show"], ["renew"], ["renew", "eu", "us"],
        ["rotate"], ["renew"], ["rotate", "--finish"], ["renew", "--ca"], ["revoke", "us"],
    ):  # fmt: skip
        done(*words, *form, home)
    assert run("show", *form, home).exit_code == 1  # us is revoked


@pytest.mark.parametrize(
    "words", [["init"], ["issue", "eu"], ["show"], ["renew", "eu"], ["revoke", "eu"], ["rotate"]]
)
def test_a_directory_that_is_not_named_is_asked_for(words: list[str], home: str) -> None:
    result = run(*words)
    assert result.exit_code == 2 and "--dir DIR" in result.output
    assert words[0] == "renew" or run(*words, home, "--dir", f"{home}2").exit_code == 2


def test_show_gives_json_to_programs(home: str) -> None:
    done("init", home)
    done("issue", "eu", home, "--host", "b.example")
    ca, eu = json.loads(done("show", home, "--json"))
    assert (ca["certificate"], eu["certificate"], eu["state"]) == ("CA", "eu", "good")
    assert eu["hosts"] == "b.example" and 364 < eu["left_days"] < 366
    done("revoke", "eu", home)
    result = run("show", home, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)[1]["state"] == "REVOKED"


def test_what_is_advised_can_be_typed(home: str) -> None:
    (make,) = advised(error("issue", "eu", home).fix)
    done(*make)
    done("issue", "eu", home)
    (renew_ca,) = advised(error("init", home).fix)
    done(*renew_ca)
    (renew,) = advised(error("issue", "eu", home).fix)
    done(*renew)
    (begin,) = advised(error("rotate", "--finish", home).fix)
    renew, finish = advised(done(*begin))
    assert advised(error("rotate", home).fix) == [renew, finish]
    (late,) = advised(error(*finish).fix)
    assert late == ["renew", "eu", "--dir", home]
    done(*late)
    done(*finish)
    done("revoke", "eu", home)
    (issue,) = advised(error("renew", "eu", home).fix)
    done(*issue)
    (show,) = advised(error("revoke", "asia", home).fix)
    done(*show)
