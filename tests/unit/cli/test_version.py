"""`geo-ray --version`: the release and the commit, read from git's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.base.version import source_commit
from geo_ray.cli.main import root

FIRST, SECOND = "1" * 40, "2" * 40


def git_folder(tree: Path, head: str) -> Path:
    folder = tree / ".git"
    folder.mkdir(parents=True)
    (folder / "HEAD").write_text(head + "\n")
    return folder


def commit_of(tree: Path) -> str:
    return source_commit(str(tree / "geo_ray" / "base" / "version.py"))


def test_it_shows_the_release_and_the_commit() -> None:
    done = CliRunner().invoke(root, ["--version"])
    assert done.exit_code == 0
    assert done.output == f"geo-ray {geo_ray.__version__} (commit {source_commit()})\n"


def test_the_commit_is_the_one_that_git_says() -> None:
    top = Path(__file__).parents[3]
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=top, capture_output=True, text=True, check=False
    )
    if said.returncode:
        pytest.skip("not a git checkout")
    assert source_commit() == said.stdout.strip()


def test_a_branch_and_a_detached_head(tmp_path: Path) -> None:
    folder = git_folder(tmp_path, "ref: refs/heads/main")
    (folder / "refs" / "heads").mkdir(parents=True)
    (folder / "refs" / "heads" / "main").write_text(FIRST + "\n")
    (folder / "packed-refs").write_text(f"# pack-refs with: peeled\n{SECOND} refs/heads/main\n")
    assert commit_of(tmp_path) == FIRST
    (folder / "refs" / "heads" / "main").unlink()
    assert commit_of(tmp_path) == SECOND
    (folder / "HEAD").write_text(FIRST + "\n")
    assert commit_of(tmp_path) == FIRST


def test_a_worktree(tmp_path: Path) -> None:
    main = git_folder(tmp_path / "main", "ref: refs/heads/main")
    (main / "packed-refs").write_text(f"{FIRST} refs/heads/main\n{SECOND} refs/heads/topic\n")
    own = main / "worktrees" / "topic"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/topic\n")
    (own / "commondir").write_text("../..\n")
    tree = tmp_path / "topic"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {own}\n")
    assert commit_of(tree) == SECOND


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "nonsense", "\udcff"])
def test_what_is_no_commit_is_unknown(head: str, tmp_path: Path) -> None:
    folder = git_folder(tmp_path, "")
    (folder / "HEAD").write_bytes(head.encode("utf-8", "surrogateescape"))
    assert commit_of(tmp_path) == "unknown"


def test_without_a_checkout_it_is_unknown(tmp_path: Path) -> None:
    """As in site-packages; a repository further up is not that of the package."""
    git_folder(tmp_path, FIRST)
    assert commit_of(tmp_path / "site-packages") == "unknown"


def test_nothing_heavy_is_imported_and_no_process_started() -> None:
    code = """
import subprocess, sys
from geo_ray.cli.main import root
subprocess.Popen = None
root.main(["--version"], standalone_mode=False)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, modules = done.stdout.splitlines()
    assert said.startswith("geo-ray ")
    heavy = {"torch", "ray", "numpy", "pyarrow", "pydantic", "yaml", "rich", "boto3"}
    assert not heavy & set(modules.split())
