"""What is said of a run that is about to begin: another name, certificates that nothing uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.api.train import check_own_certificates, new_run, resumed_run
from geo_ray.base.errors import CertificateError
from geo_ray.base.load import text_of
from geo_ray.cli.main import root
from geo_ray.runs import directory
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.start_checks import start_notes
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.transport.security import cert_store
from tests.support.job_support import TEXT, digits, experiment

SMALL = ("--plain", "--set", "train.steps=2", "--set", "checkpoint.every_s=9")


def notes_of(tmp_path: Path, *, emulated: bool = False) -> list[str]:
    config = text_of(experiment(f"run.dir={tmp_path}"), tmp_path)
    ready = [new_run(config, (), None, lambda _: None, emulated=emulated) for _ in range(3)]
    assert [each.run.path.name for each in ready] == ["trial", "trial-2", "trial-3"]
    return [each.note for each in ready]


def test_a_run_with_a_taken_name_says_so(tmp_path: Path) -> None:
    first, second, third = notes_of(tmp_path)
    assert first == ""
    assert second.startswith(f"this run is trial-2, because {tmp_path / 'trial'} exists")
    assert "--resume" not in second and "--set name=NAME" in second and "trial-3" in third


def test_only_what_was_saved_and_is_not_finished_is_called_resumable(tmp_path: Path) -> None:
    notes_of(tmp_path)
    taken = tmp_path / "trial"
    store = CheckpointStore(taken / "checkpoints")
    store.begin(0)
    fields = {"id": 0, "step": 5, "created": "-", "config_digest": "ab" * 32, "parts": ()}
    store.commit(0, CheckpointManifest.model_validate(fields))
    config = text_of(experiment(f"run.dir={tmp_path}"), tmp_path)
    said = new_run(config, (), None, lambda _: None).note
    assert f"--resume {taken} continues that run" in said
    assert "--resume" not in new_run(config, (), None, lambda _: None, emulated=True).note


def test_a_simulation_says_so_when_it_begins_and_not_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial.yaml").write_text(TEXT)
    for said in (False, True):
        done = CliRunner().invoke(root, ["simulate", "trial.yaml", *SMALL])
        assert done.exit_code == 0, done.output
        assert ("this run is trial-2, because" in done.output) == said
    wrong = ("--set", "train.target={metric: accurracy, value: 0.5, direction: at_least}")
    done = CliRunner().invoke(root, ["simulate", "trial.yaml", *SMALL, *wrong])
    assert done.exception is not None and "this run is" not in done.output


def test_certificates_are_looked_at_before_a_run_is_made(tmp_path: Path) -> None:
    for name in ("certs", "other"):
        cert_store.init(tmp_path / name)
        for region in ("eu", "us"):
            cert_store.issue(tmp_path / name, region)
    keys = (f"run.dir={tmp_path}", f"transport.certs={tmp_path / 'certs'}")
    config = text_of(experiment(*keys), tmp_path)
    new_run(config, (), None, lambda _: None)
    us = tmp_path / "certs/regions/us"
    shutil.rmtree(us)
    shutil.copytree(tmp_path / "other/regions/us", us)
    with pytest.raises(CertificateError, match=f"region 'us'.*{us}/cert.pem.*from another CA"):
        new_run(config, (), None, lambda _: None)
    with pytest.raises(CertificateError, match="from another CA"):
        check_own_certificates(experiment(*keys), goes_on=True)
    new_run(config, ("transport.tls=off",), None, lambda _: None)
    new_run(config, (), None, lambda _: None, emulated=True)
    shutil.rmtree(us)
    with pytest.raises(CertificateError, match=f"region 'us'.*cannot read {us}"):
        new_run(config, (), None, lambda _: None)
    elsewhere = ("cluster={kind: existing}",)  # us has a bridge, and its files, on another host
    new_run(config, elsewhere, None, lambda _: None)
    assert not (tmp_path / "trial-5").exists()


def test_a_region_that_was_shut_out_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    cert_store.init(tmp_path)
    for region in ("eu", "us"):
        cert_store.issue(tmp_path, region)
    cert_store.revoke(tmp_path, "us")
    run = experiment(f"transport.certs={tmp_path}")
    check_own_certificates(run, goes_on=True)
    with pytest.raises(CertificateError, match=r"region 'us'.*was revoked"):
        check_own_certificates(run)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("transport.certs=x",), "transport.certs is not used: all links are loopback"),
        (("transport.certs=x", "transport.tls=off"), "not used: transport.tls is off"),
        (("transport.certs=x", "transport.tls=required"), ""),
        (("transport.certs=x", "cluster={kind: existing}"), ""),
        (("transport.certs=x", "regions=[{name: eu}]"), ""),
        ((), ""),
    ],
)
def test_certificates_that_nothing_uses_are_told_of(
    keys: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    config = experiment(*keys)
    manifest, _ = prepare_manifest(config, digits(), tmp_path, tmp_path)
    notes = [note for note in start_notes(config, manifest, 8) if "certs" in note]
    assert len(notes) == (said != "") and all(said in note for note in notes)
    assert not [note for note in start_notes(config, manifest, None) if "certs" in note]


def test_who_is_absent_at_a_resume_is_so_only_where_the_resume_says_it(tmp_path: Path) -> None:
    """A region that was absent as the run began may have joined since."""
    begun = new_run(
        text_of(
            experiment(f"run.dir={tmp_path}", "averager.region=us", "members.absent=[eu]"), tmp_path
        ),
        (),
        None,
        lambda _: None,
        emulated=False,
    )
    store = CheckpointStore(begun.run.checkpoints)
    store.begin(0)
    fields = {"id": 0, "step": 5, "created": "-", "config_digest": "ab" * 32, "parts": ()}
    store.commit(0, CheckpointManifest.model_validate(fields))

    def away(config: Path | None, *changes: str) -> frozenset[str]:
        return resumed_run(begun.run.path, config, changes, None, allowed=["members"]).away

    assert away(None) == frozenset()
    assert away(None, "train.steps=50") == frozenset()
    assert away(None, "members.absent=[eu]") == {"eu"}
    assert away(begun.run.path / directory.CONFIG_FILE) == {"eu"}
