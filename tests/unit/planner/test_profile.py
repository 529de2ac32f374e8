"""Profiles: measurements of short runs, the fitted line, and their use and rejection by plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import ConfigError, ExtrapolationError, OtherModelError, ProfileError
from geo_ray.base.load import load_text, load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import ModelId
from geo_ray.planner.profile import (
    ExchangePoint,
    NoisePoint,
    Profile,
    StartPoint,
    StepPoint,
    fit_start,
    fit_steps,
    load_profile,
    save_profile,
)
from geo_ray.runs.follow_plan import model_id
from geo_ray.runs.planning import Sources, begin_profile, machine_types_of, make_plan
from geo_ray.sweep.profile import (
    Corner,
    corners,
    evaluation_s,
    exchange_point,
    experiment_of,
    first_step_s,
    missing,
    step_points,
)
from geo_ray.telemetry.events import Event
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.links import table_of

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
PLANNED = ("task.options={size: 0.1M}", "plan.startup_s=0")
REGIONS = ("us", "eu", "asia")
TEXT = """
name: trial
task: {use: digits}
data: {generate: {}, batch_size: 16}
regions: [{name: eu, workers: 2}, {name: us}]
strategy: {kind: sma, interval: 40}
optimizer: {kind: sgd}
train: {steps: 100}
emulate: {link: {rate_mbps: 80, delay_s: 0.1}, rows_per_s_by_region: {eu: [10, 20]}}
"""


def trial(*overrides: str) -> Experiment:
    return load_text(TEXT, list(overrides), Experiment, "trial.yaml")


def point(workers: int, rows: int, step_s: float, machine: str = "a", region: str = "eu"):
    return StepPoint(
        region=region,
        machine=machine,
        workers=workers,
        rows=rows,
        step_s=step_s,
        spread=0.0,
        steps=20,
    )


def line(workers: int, rows: int, row_s: float = 0.01) -> float:
    return 0.2 + row_s * rows + 0.03 * workers


# ------------------------------------------------------------------ the line


def test_three_extremes_determine_the_line():
    points = [point(k, b, line(k, b)) for k, b in ((1, 4), (1, 16), (4, 4))]
    model = fit_steps("eu", points)
    assert model.step_s("a", 3, 10) == pytest.approx(line(3, 10))
    assert (model.rows["a"], model.workers) == ((4, 16), (1, 4))
    assert model.error == pytest.approx(0, abs=1e-9)


def test_machines_of_two_types_share_what_is_not_theirs():
    points = [point(k, b, line(k, b)) for k, b in ((1, 4), (1, 16), (4, 4))]
    points += [point(1, b, line(1, b, 0.05), "b") for b in (4, 16)]
    model = fit_steps("eu", points)
    assert model.row_s["b"] == pytest.approx(0.05)
    assert model.step_s("b", 4, 8) == pytest.approx(line(4, 8, 0.05))


def test_inseparable_coefficients_are_fixed():
    one_count = fit_steps("eu", [point(2, b, line(2, b)) for b in (4, 16)])
    assert one_count.lan_s == 0 and one_count.fixed_s == pytest.approx(0.26)
    one_batch = fit_steps("eu", [point(2, 8, 0.4)])
    assert one_batch.fixed_s == pytest.approx(0.2)
    assert one_batch.row_s["a"] == pytest.approx(0.2 / 8)


def test_no_part_of_a_step_takes_less_than_nothing():
    shrinking = fit_steps("eu", [point(1, 4, 0.5), point(1, 16, 0.4), point(4, 16, 0.3)])
    assert min(shrinking.fixed_s, shrinking.lan_s, shrinking.row_s["a"]) >= 0
    assert shrinking.error > 0.05


def test_a_region_without_points_is_named():
    with pytest.raises(ProfileError, match="'mars'"):
        fit_steps("mars", [point(1, 4, 0.5)])


def test_what_was_not_measured_is_refused():
    model = fit_steps("eu", [point(1, 4, 0.5), point(2, 16, 0.9)])
    model.check("a", 2, 16)
    with pytest.raises(ExtrapolationError, match="32 rows on a a; measured were 4 to 16"):
        model.check("a", 2, 32)
    with pytest.raises(ExtrapolationError, match="3 workers; measured were 1 to 2"):
        model.check("a", 3, 8)


# ------------------------------------------------------------------ short runs


def test_extremes_and_grid():
    three = corners((1, 4), (8, 32), (None,), full=False)
    assert three == [Corner(1, 8), Corner(1, 32), Corner(4, 8)]
    assert len(corners((1, 2, 4), (8, 16), (None,), full=True)) == 6
    assert corners((1,), (8,), (None, "int8"), full=False) == [Corner(1, 8), Corner(1, 8, "int8")]
    turns = corners((1, 4), (8, 32), (None, "int8"), full=False)
    assert [corner.codec for corner in turns] == [None, "int8", None]


def test_a_corner_is_the_same_job_but_shorter():
    short = experiment_of(Corner(1, 4, "int8"), trial(), 20, "/nowhere", Path())
    assert [region.workers for region in short.regions] == [1, 1]
    assert (short.data.batch_size, short.train.steps, short.strategy.interval) == (4, 23, 5)
    assert short.codec.up.kind == short.codec.down.kind == "int8"
    assert short.emulate.rows_per_s_by_region == {"eu": (10.0,)}
    assert short.checkpoint.every_s is None and short.run.dir == "/nowhere"


def test_an_interval_that_other_knobs_need_stays():
    strategy = "strategy={kind: diloco_streaming, interval: 40, fragments: 8, tau: 4}"
    assert experiment_of(Corner(1, 4), trial(strategy), 20, "/x", Path()).strategy.interval == 40


def test_known_corners_are_not_measured_again():
    experiment, machines = trial(), {"eu": "a", "us": "a"}
    model = ModelId(task="digits", num_params=10)
    known = Profile(model=model, hardware="h").with_steps(
        [point(1, 4, 0.5), point(1, 4, 0.5, region="us")]
    )
    wanted = [Corner(1, 4), Corner(2, 4)]
    assert missing(wanted, experiment, machines, known) == wanted  # no exchange is known
    overhead = ExchangePoint(codec=None, overhead_s=0.1, up_bytes=1, down_bytes=1, count=1)
    assert missing(wanted, experiment, machines, known.with_exchanges([overhead])) == wanted[1:]


def events() -> list[Event]:
    found = []
    for step in range(1, 11):
        took_s = 0.5 if step <= 3 else 0.1 + (0.3 if step == 7 else 0.0)
        for region in ("eu", "us"):
            fields = {"region": region, "step": step, "start_s": 10.0 * step}
            found.append(Event("step", 10.0 * step + took_s, fields))
    found.append(Event("eval", 65.0, {"region": "eu", "step": 6, "metrics": {}, "samples": 1}))
    wire = {"bytes_sent": 1_000_000, "bytes_received": 1_000_000, "start_s": 50.0}
    found.append(Event("exchange", 50.55, {"region": "us", "held_s": 0.1, **wire}))
    found.append(Event("exchange", 50.35, {"region": "eu", "held_s": 0.1, **wire}))
    return found


def test_step_times_from_events_exclude_the_first_steps():
    found = step_points(events(), trial(), {"eu": "a", "us": "b"})
    assert [each.key for each in found] == [("eu", "a", 2, 16), ("us", "b", 1, 16)]
    assert found[0].step_s == pytest.approx(0.1) and found[0].steps == 7
    with pytest.raises(ProfileError, match="'eu': 1 steps"):
        step_points(events()[:8], trial(), {"eu": "a", "us": "b"})


def test_evaluation_time_is_read_from_events():
    assert evaluation_s(events()) == pytest.approx(0.3)
    assert evaluation_s(events()[:12]) is None


def test_the_first_step_begins_when_workers_have_joined():
    assert first_step_s(list(reversed(events()))) == 10.0
    with pytest.raises(ProfileError, match="no step"):
        first_step_s([])


def test_exchange_overhead_is_read_from_events():
    links = table_of(
        {pair: LinkSpec(rate_mbps=80, delay_s=0.05) for pair in (("us", "eu"), ("eu", "us"))}
    )
    found = exchange_point(events(), "eu", None, links)
    # 0.55 s, of which the averager held it for 0.1, two times 1 MB took 0.2 and the round trip 0.1
    assert found.overhead_s == pytest.approx(0.15)
    assert (found.up_bytes, found.count) == (1_000_000, 1)
    assert exchange_point(events(), "eu", None, table_of({})) is None


# ------------------------------------------------------------------ files


def test_profiles_are_kept_and_only_for_the_same_model(tmp_path):
    path = tmp_path / "profiles" / "p.json"
    experiment = load_tree(CONFIG, list(PLANNED), Experiment)
    fresh = begin_profile(experiment, CONFIG.parent, path, "here")
    assert fresh.steps == () and fresh.model.num_params > 0
    save_profile(fresh.with_steps([point(1, 4, 0.5)]), path)
    assert load_profile(path).steps == (point(1, 4, 0.5),)
    assert begin_profile(experiment, CONFIG.parent, path, "here").steps
    assert not begin_profile(experiment, CONFIG.parent, path, "another machine").steps
    other = load_tree(CONFIG, ["task.options={size: 0.1M, context: 32}"], Experiment)
    assert not begin_profile(other, CONFIG.parent, path, "here").steps
    path.write_text("{}")
    with pytest.raises(ProfileError, match="not valid"):
        begin_profile(experiment, CONFIG.parent, path, "here")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_a_user_file_distinguishes_models(tmp_path):
    file = tmp_path / "task.py"
    file.write_text("one")
    experiment = load_tree(CONFIG, ["task={use: 'task.py:Mine'}"], Experiment)
    before = model_id(experiment, tmp_path, 10)
    assert before.differs(model_id(experiment, tmp_path, 10)) is None
    assert "11 parameters" in str(before.differs(model_id(experiment, tmp_path, 11)))
    file.write_text("two")
    assert "file has changed" in str(before.differs(model_id(experiment, tmp_path, 10)))


def test_the_machines_of_regions_have_names():
    experiment = load_tree(CONFIG, list(PLANNED), Experiment)
    with pytest.raises(ConfigError, match=r"'us' could rent g5\.xlarge, g4dn\.xlarge"):
        machine_types_of(experiment, ["eu=g5.xlarge", "asia=g4dn.xlarge"])
    with pytest.raises(ConfigError, match="not REGION=TYPE"):
        machine_types_of(experiment, ["mars=g5.xlarge"])
    assert machine_types_of(trial(), []) == {"eu": "here", "us": "here"}
    one = ["plan.regions.us.machines=[{type: x, cap: 1}]", *PLANNED]
    named = load_tree(CONFIG, one, Experiment)
    assert machine_types_of(named, ["eu=g5.xlarge", "asia=g4dn.xlarge"])["us"] == "x"


# ------------------------------------------------------------------ plans


def profile_file(tmp_path: Path, **changes) -> Path:
    experiment = load_tree(CONFIG, list(PLANNED), Experiment)
    found = begin_profile(experiment, CONFIG.parent, tmp_path / "none", "here")
    grid = [(k, b) for k in (1, 8) for b in (1, 128)]
    points = [point(k, b, line(k, b), "g5.xlarge", name) for name in REGIONS for k, b in grid]
    overhead = ExchangePoint(codec=None, overhead_s=2.0, up_bytes=1, down_bytes=1, count=9)
    found = found.with_steps(points).with_exchanges([overhead])
    save_profile(found.model_copy(update=changes), tmp_path / "p.json")
    return tmp_path / "p.json"


def planned(profile: Path | None, *overrides: str, extrapolate: bool = False):
    machines = [f"plan.regions.{name}.machines=[{{type: g5.xlarge, cap: 8}}]" for name in REGIONS]
    experiment = load_tree(CONFIG, [*PLANNED, *machines, *overrides], Experiment)
    sources = Sources(profile=profile, extrapolate=extrapolate)
    return make_plan(experiment, CONFIG.parent, "optimal", sources).plan


def test_a_plan_goes_by_what_was_measured(tmp_path):
    plan = planned(profile_file(tmp_path), "plan.intervals=[32]", "plan.codecs=[null]")
    for region in plan.regions:
        rows = max(machines.rows for machines in region.machines)
        assert region.step_s == pytest.approx(line(region.workers, rows), rel=0.02)
    assert plan.seconds["between regions"] > 625 * 2.0  # what exchanges take beside their bytes
    assert any("as measured in" in note for note in plan.notes)
    assert plan.seconds_range[0] <= plan.total_s <= plan.seconds_range[1]


def test_the_start_is_as_profiled_if_the_configuration_leaves_it_open(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.startup_s: null"):
        planned(profile_file(tmp_path), "plan.startup_s=null")
    starts = tuple(StartPoint(workers=k, start_s=10 + 2 * k) for k in (3, 10))
    plan = planned(profile_file(tmp_path, starts=starts), "plan.startup_s=null")
    workers = sum(region.workers for region in plan.regions)
    assert plan.seconds["start"] == pytest.approx(10 + 2 * workers)
    given = planned(profile_file(tmp_path, starts=starts), "plan.startup_s=7")
    assert given.seconds["start"] == 7


def test_the_line_through_starts():
    one = fit_start([StartPoint(workers=4, start_s=9.0)])
    assert (one.seconds(4), one.seconds(40)) == (9.0, 9.0)
    falling = fit_start([StartPoint(workers=k, start_s=20 - k) for k in (2, 6)])
    assert falling.worker_s == 0 and 14 < falling.fixed_s < 18
    profile = Profile(model=ModelId(task="bytelm", num_params=7), hardware="here")
    for start_s in (5.0, 6.0):
        profile = profile.with_start(StartPoint(workers=2, start_s=start_s))
    assert [each.start_s for each in profile.starts] == [6.0]


def test_a_profile_of_the_same_model_is_found_under_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = profile_file(tmp_path)
    kept = tmp_path / "runs" / "profiles"
    kept.mkdir(parents=True)
    other = ModelId(task="bytelm", num_params=7)
    save_profile(load_profile(made).model_copy(update={"model": other}), kept / "planned.json")
    (kept / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match="speed of"):
        planned(None)
    save_profile(load_profile(made), kept / "cousin.json")
    assert any("cousin.json" in note for note in planned(None).notes)


def test_a_plan_is_refused_beyond_what_was_measured(tmp_path):
    small = profile_file(
        tmp_path,
        steps=tuple(
            point(k, b, line(k, b), "g5.xlarge", name)
            for name in REGIONS
            for k, b in ((1, 1), (1, 4), (2, 4))
        ),
    )
    with pytest.raises(ExtrapolationError, match=r"measured were 1 to \d"):
        planned(small)
    assert planned(small, extrapolate=True).total_s > 0


def test_the_profile_of_another_model_is_refused(tmp_path):
    other = ModelId(task="bytelm", options={"size": "0.1M"}, num_params=7)
    with pytest.raises(OtherModelError, match="parameters, not 7"):
        planned(profile_file(tmp_path, model=other))


def test_unknown_speeds_are_requested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"speed of g5\.xlarge"):
        planned(None)


def test_pollux_chooses_the_batch_by_the_noise(tmp_path):
    progress = ("plan.progress={kind: pollux}", "plan.batch_sizes=[64, 256]")
    with pytest.raises(ProfileError, match="noise"):
        planned(profile_file(tmp_path), *progress)

    def noise(b_simple: float) -> NoisePoint:
        return NoisePoint(grad_sq=1.0, trace=b_simple, rows=256, workers=4, count=100)

    loud = planned(profile_file(tmp_path, noise=noise(1e6)), *progress)
    assert sum(sum(region.batch_sizes) for region in loud.regions) == 256
    quiet = planned(profile_file(tmp_path, noise=noise(1.0)), *progress)
    assert sum(sum(region.batch_sizes) for region in quiet.regions) == 64
    assert quiet.steps == pytest.approx(20000 / quiet.lr_gain)
    assert quiet.lr_gain == pytest.approx((1 / 256 + 1) / (1 / 64 + 1))


def test_scavengers_line_goes_through_runs_of_ones_own(tmp_path):
    runs = "runs: [{rows: 64, steps: 1000}, {rows: 256, steps: 500}]"
    line_of = f"plan.progress={{kind: scavenger, {runs}}}"
    path = profile_file(tmp_path)
    assert planned(path, line_of, "plan.batch_sizes=[64]").steps == pytest.approx(1000)
    with pytest.raises(ExtrapolationError, match="a batch of 32 rows"):
        planned(path, line_of, "plan.batch_sizes=[32]")
    with pytest.raises(ConfigError, match="two different batches"):
        planned(path, line_of.replace("rows: 256", "rows: 64"))


def test_a_dry_run_prints_time_and_cost_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(CONFIG), "--dry-run", "--out", "p.json"]
    result = CliRunner().invoke(root, words)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1 and "USD (" in result.stdout
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("words", [["--workers", "0"], ["--batch-sizes", "a"], ["--codecs", "zip"]])
def test_words_that_make_no_sense_are_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(TEXT)
    result = CliRunner().invoke(root, ["profile", "t.yaml", *words])
    assert result.exit_code == 2 and words[0] in result.output
