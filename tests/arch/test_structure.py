"""Modules are deep: no small module with one importer, no field that is a callback."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

SMALL = 150  # lines
# A table of contents each: of a run, and of a worker.
LOOPS = ("geo_ray.runtime.main", "geo_ray.runtime.worker_loop")
# Fields that are still callables. A new one is a method of a named protocol or a return value.
CALLBACKS = {
    "geo_ray.cloud.agent:NoticeAgent.drain",
    "geo_ray.cloud.autoscaler.policy:Decided.actions",
    "geo_ray.cloud.backtest.simulated_cloud:SimulatedCloud.now",
    "geo_ray.codecs.base:CodecTraits.with_shapes",
    "geo_ray.runs.evaluation:EvalNotes.emit",
    "geo_ray.runtime.remote_shard:Operation.run",
    "geo_ray.runs.evaluation:EvalSetting.note",
    "geo_ray.simulator.world:SimNotes.emit",
    "geo_ray.training.assignment:RegionWork.copy_partition",
    "geo_ray.training.failover:Caller.opener",
    "geo_ray.transport.overlay.coordinator:Coordinator.out",
    "geo_ray.transport.overlay.node:Node.out",
    "geo_ray.transport.overlay.node:_Round.commit",
    "geo_ray.transport.session:Callbacks.on_message",
    "geo_ray.transport.session:Callbacks.on_peer",
    "geo_ray.transport.session:_Partial.writers",
    "geo_ray.transport.udp:_Session.opener",
    "geo_ray.transport.uploads:UploadPath.duration_s",
    "geo_ray.transport.wire.fields:Kind.fits",
    "geo_ray.transport.wire.fields:Kind.make",
    "geo_ray.transport.wire.handshake:HandshakeSide.admit",
    "geo_ray.transport.wire.handshake:HandshakeSide.send",
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "architecture.md"


def importers(files: list[Any]) -> dict[str, set[str]]:
    """The modules of the library that import each one, at the top or within functions."""
    names = {file.name for file in files}
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for _, target in file.imports():
            module = target if target in names else target.rpartition(".")[0]
            if module in names and module != file.name:
                found[module].add(file.name)
    return found


def small_with_one_importer(files: list[Any]) -> set[str]:
    by = importers(files)
    return {
        file.name
        for file in files
        if len(by[file.name]) == 1
        and file.num_lines < SMALL
        and file.path.name != "__init__.py"
        and 'if __name__ == "__main__":' not in file.text.splitlines()
    }


def listed() -> set[str]:
    """The modules that docs/design/architecture.md lists with a reason, by name."""
    text = PAGE.read_text()
    table = text[text.index("## Small modules with one importer") :].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| \S.+ \|$", table, flags=re.M)
    paths = [path for row in rows for path in re.findall(r"`([\w/]+)\.py`", row)]
    return {"geo_ray." + path.replace("/", ".") for path in paths}


def callable_names(files: list[Any]) -> set[str]:
    """Aliases of callables, by name, resolved until nothing is added."""
    found = {"Callable"}
    while True:
        more = set(found)
        for file in files:
            for node in file.tree.body:
                value = getattr(node, "value", None)
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.targets[0], ast.Name)
                    and isinstance(value, ast.Subscript | ast.BinOp | ast.Name)
                    and names_in(value) & found
                ):
                    more.add(node.targets[0].id)
        if more == found:
            return found
        found = more


def names_in(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def callback_fields(files: list[Any]) -> set[str]:
    """Fields of classes whose type is, or contains, a callable: module:Class.field."""
    callables = callable_names(files)
    return {
        f"{file.name}:{node.name}.{ast.unparse(field.target)}"
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and names_in(field.annotation) & callables
    }


def test_small_modules_with_one_importer_are_listed_with_a_reason(library: list[Any]) -> None:
    assert small_with_one_importer(library) == listed()


def test_no_more_fields_are_callbacks(library: list[Any]) -> None:
    assert callback_fields(library) == CALLBACKS


def test_the_loops_are_short_and_a_worker_needs_no_ray(library: list[Any]) -> None:
    loops = {file.name: file for file in library if file.name in LOOPS}
    assert sorted(loops) == sorted(LOOPS)
    assert {name: file.num_lines for name, file in loops.items() if file.num_lines >= SMALL} == {}
    assert "ray" not in {target for _, target in loops[LOOPS[1]].imports()}


def test_the_rules_find_what_they_forbid(source_file: Any) -> None:
    files = [
        source_file.parse("geo_ray.a", "from geo_ray.b import f"),
        source_file.parse("geo_ray.b", "Tell = Callable[[str], None]\nSink = Tell | None"),
        source_file.parse("geo_ray.c", "class C:\n    told: Sink\n    name: str"),
    ]
    assert small_with_one_importer(files) == {"geo_ray.b"}
    assert callback_fields(files) == {"geo_ray.c:C.told"}
