"""Tencent's files, held against a description of its provider, which is not at hand to run.

`tencent_schema.json` is the part of that description that they use (`cut_schema.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest

INFRA = Path(__file__).parents[3] / "infra" / "terraform"
SCHEMA = json.loads((Path(__file__).parent / "tencent_schema.json").read_text())
FOLDERS = sorted(
    {path.parent for path in INFRA.rglob("*.tf") if "tencentcloud" in path.read_text()}
    | {INFRA / "modules" / name for name in ("boot", "tunnel")}
)
META = {"count", "for_each", "depends_on", "provider", "lifecycle", "providers", "source"}


@dataclass(frozen=True)
class Block:
    """A resource, data source or module call: arguments by name, blocks by name."""

    where: str
    kind: str
    name: str
    arguments: dict[str, Any]
    blocks: dict[str, list[dict[str, Any]]]


def plain(value: Any) -> Any:
    """Return a value without the quotes and marks of the parser."""
    if isinstance(value, dict):
        return {
            plain(key): plain(item)
            for key, item in value.items()
            if key not in ("__comments__", "__inline_comments__")
        }
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


def body_of(where: str, kind: str, name: str, body: dict[str, Any]) -> Block:
    arguments: dict[str, Any] = {}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for key, value in body.items():
        if key == "__is_block__":
            continue
        if key == "dynamic":
            for each in value:
                for made, held in each.items():
                    blocks.setdefault(made, []).extend(held["content"])
        elif isinstance(value, list) and value and all(is_block(item) for item in value):
            blocks.setdefault(key, []).extend(value)
        else:
            arguments[key] = value
    return Block(where, kind, name, arguments, blocks)


def is_block(value: Any) -> bool:
    return isinstance(value, dict) and "__is_block__" in value


@cache  # reading takes a while
def parsed(folder: Path) -> dict[str, Any]:
    """Return all files of a folder as one tree of lists."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.tf")):
        with path.open() as file:
            for key, value in plain(hcl2.load(file)).items():
                if key != "__is_block__":
                    found.setdefault(key, []).extend(value)
    return found


def blocks_of(tree: dict[str, Any], word: str) -> Iterator[Block]:
    for each in tree.get(word, []):
        for kind, named in each.items():
            for name, body in named.items():
                if is_block(body):
                    yield body_of(f'{word} "{kind}" "{name}"', kind, name, body)


def complaints(block: Block, schema: dict[str, Any]) -> list[str]:
    """Return what the provider would reject."""
    known, found = schema["arguments"], []
    given = (set(block.arguments) | set(block.blocks)) - META - {"timeouts"}
    for name in sorted(given - set(known)):
        found.append(f"no argument {name}")
    for name in sorted(given & set(known)):
        if bool(known[name].get("block")) != (name in block.blocks):
            found.append(f"{name} is written as the other of argument and block")
    for name, about in known.items():
        if about.get("required") and name not in given:
            found.append(f"{name} is missing")
    deprecated = set(schema.get("deprecated_arguments", ()))
    found += [f"{name} is deprecated" for name in sorted(given & deprecated)]
    for pair in schema.get("conflicts", ()):
        if set(pair) <= given:
            found.append(f"{' and '.join(pair)} exclude each other")
    for some in schema.get("at_least_one_of", ()):
        if not set(some) & given:
            found.append(f"one of {some} is missing")
    for some in schema.get("exactly_one_of", ()):
        if len(set(some) & given) != 1:
            found.append(f"not exactly one of {some}")
    for name, others in schema.get("required_with", {}).items():
        if name in given and not set(others) <= given:
            found.append(f"{name} needs {others}")
    if "timeouts" in block.blocks and "timeouts" not in schema:
        found.append("it has no timeouts")
    for name, bodies in block.blocks.items():
        for body in bodies:
            found += inner_complaints(name, body, schema)
    for name, limits in schema.get("block_count", {}).items():
        count = len(block.blocks.get(name, ()))
        if "." not in name and (count > limits.get("max", count) or count < limits.get("min", 0)):
            found.append(f"{count} blocks {name}")
    return [f"{block.where}: {each}" for each in found]


def inner_complaints(path: str, body: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    known = schema["blocks"].get(path)
    if known is None:
        return [] if path in ("timeouts", "lifecycle") else [f"no block {path}"]
    inner, found = body_of("", path, "", body), []
    nested = {name.removeprefix(f"{path}.") for name in schema["blocks"] if name.startswith(path)}
    given = set(inner.arguments) | set(inner.blocks)
    found += [f"no {path}.{name}" for name in sorted(given - set(known) - nested)]
    found += [
        f"{path}.{n} is missing" for n, a in known.items() if a.get("required") > (n in given)
    ]
    found += [
        f"{path}.{name} is deprecated"
        for name in sorted(given)
        if f"{path}.{name}" in schema.get("deprecated_arguments", ())
    ]
    for group in schema.get("at_most_one_of_in_block", {}).get(path, ()):
        used = [one for one in group if set(one.split("|")) & given]
        if len(used) > 1:
            found.append(f"{path}: only one of {used}")
    for name, bodies in inner.blocks.items():
        for each in bodies:
            found += inner_complaints(f"{path}.{name}", each, schema)
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(INFRA)))
def test_the_provider_takes_every_block(folder: Path) -> None:
    tree, found = parsed(folder), []
    for word, kinds in (("resource", "resources"), ("data", "data_sources")):
        for block in blocks_of(tree, word):
            if block.kind.startswith("tencentcloud_"):
                schema = SCHEMA[kinds].get(block.kind)
                found += [f"{block.where}: unknown"] if schema is None else []
                found += [] if schema is None else complaints(block, schema)
                if schema is not None and schema.get("deprecated") is True:
                    found.append(f"{block.where}: deprecated")
    for each in tree.get("provider", []):
        for kind, body in each.items():
            if kind == "tencentcloud":
                names = set(body) - {"alias", "__is_block__"}
                found += [f"provider: {n}" for n in names - set(SCHEMA["provider"]["arguments"])]
    assert found == []


# ------------------------------------------------------------------ what refers to what


def names_in(tree: dict[str, Any], word: str) -> set[str]:
    return {name for each in tree.get(word, []) for name in each if name != "__is_block__"}


def text_of(folder: Path) -> str:
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.tf")))
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(INFRA)))
def test_every_reference_leads_somewhere(folder: Path) -> None:
    tree, text, found = parsed(folder), text_of(folder), []
    variables = names_in(tree, "variable")
    own_locals = {name for each in tree.get("locals", []) for name in each}
    for word, known in (("var", variables), ("local", own_locals)):
        used = set(re.findall(rf"(?<![\w.]){word}\.(\w+)", text))
        found += [f"{word}.{name}" for name in sorted(used - known)]
    found += [f"var.{name} is not used" for name in sorted(variables - set(
        re.findall(r"(?<![\w.])var\.(\w+)", text)))]  # fmt: skip
    resources = {f"{b.kind}.{b.name}" for b in blocks_of(tree, "resource")}
    for kind, name, attribute in re.findall(
        r"(?<![\w.\"/-])(tencentcloud_\w+)\.(\w+)(?:\[[^\]]*\])?\.(\w+)", text
    ):
        schema = SCHEMA["resources"].get(kind)
        if f"{kind}.{name}" not in resources or schema is None:
            found.append(f"{kind}.{name}")
        elif attribute not in set(schema["arguments"]) | set(schema["attributes"]):
            found.append(f"{kind}.{name}.{attribute}")
    for kind, attribute in re.findall(r"data\.(tencentcloud_\w+)\.\w+\.(\w+)", text):
        schema = SCHEMA["data_sources"][kind]
        if attribute not in set(schema["arguments"]) | set(schema["attributes"]):
            found.append(f"data.{kind}.{attribute}")
    calls = {name: body for each in tree.get("module", []) for name, body in each.items()}
    for name, attribute in re.findall(r"(?<![\w.])module\.(\w+)(?:\[[^\]]*\])?\.(\w+)", text):
        if name not in calls:
            found.append(f"module.{name}")
        else:
            other = parsed((folder / calls[name]["source"]).resolve())
            if attribute not in names_in(other, "output"):
                found.append(f"module.{name}.{attribute}")
    assert found == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(INFRA)))
def test_every_module_gets_what_it_asks_for(folder: Path) -> None:
    found = []
    for each in parsed(folder).get("module", []):
        for name, body in each.items():
            other = parsed((folder / body["source"]).resolve())
            asked = {n: b for v in other.get("variable", []) for n, b in v.items()}
            given = set(body) - META - {"__is_block__"}
            found += [f"{name}: no variable {one}" for one in sorted(given - set(asked))]
            needed = {one for one, about in asked.items() if "default" not in about}
            found += [f"{name}: {one} is missing" for one in sorted(needed - given)]
    assert found == []


# ------------------------------------------------------------------ what the files promise


def all_blocks(kind: str) -> list[Block]:
    return [b for f in FOLDERS for b in blocks_of(parsed(f), "resource") if b.kind == kind]


def test_nothing_comes_in_from_the_world() -> None:
    rules = [r for b in all_blocks("tencentcloud_security_group_rule_set")
             for r in b.blocks["ingress"]]  # fmt: skip
    assert len(rules) == 4
    for rule in rules:
        assert "0.0.0.0/0" not in rule["cidr_block"] and "cidr_block" in rule
    values = {rule["cidr_block"] for rule in rules}
    assert values == {
        "${ingress.value.cidr}",
        "${ingress.value}",
        "${ingress.value.address}/32",
        "${var.cidr}",
    }


def test_disks_and_buckets_are_encrypted_and_machines_have_no_public_address() -> None:
    machines = all_blocks("tencentcloud_instance")
    assert len(machines) == 3
    for machine in machines:
        assert str(machine.arguments["system_disk_encrypt"]).lower() == "true"
        assert str(machine.arguments["allocate_public_ip"]).lower() == "false"
        for disk in machine.blocks.get("data_disks", []):
            assert str(disk["encrypt"]).lower() == "true"
    (bucket,) = all_blocks("tencentcloud_cos_bucket")
    assert bucket.arguments["acl"] == "private"
    assert "AES256" in bucket.arguments["encryption_algorithm"]
    assert str(bucket.arguments["versioning_enable"]).lower() == "true"
    assert bucket.blocks["lifecycle_rules"][0]["non_current_expiration"]
    assert bucket.arguments["bucket"].endswith("-${data.tencentcloud_user_info.here.app_id}")


def test_no_secret_is_kept_in_the_state() -> None:
    (version,) = all_blocks("tencentcloud_ssm_secret_version_v2")
    assert "secret_string_wo" in version.arguments
    assert not {"secret_string", "secret_binary"} & set(version.arguments)


def test_a_set_of_rules_of_one_group_is_there_once() -> None:
    """A second rule set for a group would replace the first one."""
    for folder in FOLDERS:
        sets = [b for b in blocks_of(parsed(folder), "resource") if b.kind.endswith("rule_set")]
        groups = [b.arguments["security_group_id"] for b in sets]
        assert sorted(set(groups)) == sorted(groups)


# ------------------------------------------------------------------ the rules bite

GOOD = 'resource "tencentcloud_eip_association" "x" {\n  eip_id = "e"\n  instance_id = "i"\n}\n'
BAD = {
    "no argument nonsense": GOOD.replace("instance_id", "nonsense"),
    "eip_id is missing": GOOD.replace('eip_id = "e"', ""),
    "exclude each other": GOOD.replace("eip_id", 'eip_id = "e"\nprivate_ip'),
    "is deprecated": 'resource "tencentcloud_instance" "x" {\n  key_name = "k"\n}\n',
    "one of ['image_id', 'launch_template_id'] is missing": (
        'resource "tencentcloud_instance" "x" {\n  availability_zone = "z"\n}\n'
    ),
    "not exactly one of": (
        'resource "tencentcloud_ssm_secret_version_v2" "x" {\n  secret_name = "s"\n'
        '  version_id = "v"\n}\n'
    ),
    "only one of": (
        'resource "tencentcloud_security_group_rule_set" "x" {\n  security_group_id = "s"\n'
        '  ingress {\n    action = "ACCEPT"\n    cidr_block = "c"\n    source_security_id = "s"\n'
        "  }\n}\n"
    ),
    "ingress.action is missing": (
        'resource "tencentcloud_security_group_rule_set" "x" {\n  security_group_id = "s"\n'
        '  dynamic "ingress" {\n    for_each = [1]\n    content {\n      cidr_block = "c"\n'
        "    }\n  }\n}\n"
    ),
    "as the other of argument and block": (
        'resource "tencentcloud_cos_bucket" "x" {\n  bucket = "b"\n  lifecycle_rules = "x"\n}\n'
    ),
}


@pytest.mark.parametrize("complaint", BAD)
def test_the_rules_bite(tmp_path: Path, complaint: str) -> None:
    for text, wrong in ((BAD[complaint], True), (GOOD, False)):
        folder = tmp_path / str(wrong)
        folder.mkdir()
        (folder / "main.tf").write_text(text)
        (block,) = blocks_of(parsed(folder), "resource")
        found = complaints(block, SCHEMA["resources"][block.kind])
        assert any(complaint in each for each in found) == wrong, found
