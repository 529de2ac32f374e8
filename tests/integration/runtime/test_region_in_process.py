"""Lead, followers, bridge and worker loops together in threads: real sockets, no Ray."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from geo_ray.base.errors import (
    DeadlineExceededError,
    InvariantError,
    LinkDownError,
    NonFiniteError,
    RunDirectoryError,
)
from geo_ray.base.types import Span, StepReport
from geo_ray.runtime.remote_shard import shared_gradient, shared_parameters
from geo_ray.training.effects import Assignment
from geo_ray.training.wire_format import (
    as_bytes,
    as_tensor,
    pull_meta,
    read_answer,
    read_pull,
    report_meta,
)
from geo_ray.transport.lan import LanClient
from geo_ray.transport.wire.fields import Meta
from tests.support.region_support import (
    KEY,
    WAIT_S,
    InProcess,
    Site,
    WorkerThread,
    eventually,
    experiment_of,
)

ALONE = [{"name": "us-east", "workers": 2}]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the tiny experiment when nothing goes wrong."""
    with InProcess(experiment_of(), tmp_path_factory.mktemp("undisturbed")) as world:
        first, second = world.run()
        world.check_books()
        assert first == second
        kinds = world.sites["us-east"].kinds()
        assert (kinds.count("step"), kinds.count("exchange"), kinds.count("stats")) == (6, 3, 2)
        return first


def start_all(world: InProcess, but: str = "") -> list[WorkerThread]:
    """Start every worker outside of one region."""
    return [
        site.start(rank)
        for name, site in world.sites.items()
        for rank in range(site.region.workers)
        if name != but
    ]


def join(client: LanClient, rank: int) -> Assignment:
    """Join by hand; the first answer."""
    return read_answer(rank, client.request({"op": "join"}, timeout_s=WAIT_S)[0])


def push_zeros(client: LanClient, site: Site, span: Span) -> None:
    """Push by hand, which waits until the whole step is done."""
    report = report_meta(StepReport(span, 1.0, 0.01, None))
    client.request(report, as_bytes(torch.zeros_like(site.shards[0].params_S)), timeout_s=WAIT_S)


# ------------------------------------------------------------------ equal to the bit


def test_bytes_instead_of_shared_memory(undisturbed: str, tmp_path: Path) -> None:
    with InProcess(experiment_of(), tmp_path) as world:
        assert world.run(shared=False) == [undisturbed] * 2


@pytest.mark.parametrize("shared", [True, False])
def test_two_shards(undisturbed: str, tmp_path: Path, shared: bool) -> None:
    regions = [
        {"name": "us-east", "workers": 2, "ps_shards": 2},
        {"name": "eu-west", "workers": 2, "ps_shards": 3},
    ]
    with InProcess(experiment_of(regions=regions), tmp_path) as world:
        assert world.run(shared=shared) == [undisturbed] * 2


def test_async_mode_trains_and_ends(tmp_path: Path) -> None:
    train = {"steps": 6, "eval_every": 3, "mode": "async"}
    strategy = {"kind": "asgd_ga", "interval": 2, "wait": "when_busy"}
    with InProcess(experiment_of(train=train, strategy=strategy), tmp_path) as world:
        world.run()
        world.check_books()
        assert [site.server.version for site in world.sites.values()] == [12, 12]


@pytest.mark.parametrize("shared", [True, False])
def test_a_pull_gets_one_version_from_all_shards(tmp_path: Path, shared: bool) -> None:
    """While one worker is between its fetches, another one's gradient changes the model."""
    regions = [{"name": "us-east", "workers": 2, "ps_shards": 2}]
    train = {"steps": 6, "eval_every": 0, "mode": "async"}
    with InProcess(experiment_of(regions=regions, train=train), tmp_path) as world:
        (site,) = world.sites.values()
        size = site.shards[1].params_S.numel()
        slow, quick = site.join(0, shared=shared), site.join(1, shared=shared)
        told, _ = slow[0].request({"op": "join"}, timeout_s=WAIT_S)
        pull: Meta = {"op": "fetch", **pull_meta(read_pull(0, told))}
        slow[0].request(pull, timeout_s=WAIT_S)
        before_S = site.shards[1].params_S.clone()

        told, _ = quick[0].request({"op": "join"}, timeout_s=WAIT_S)
        for client, shard in zip(quick, site.shards, strict=True):
            ones_S = torch.ones_like(shard.params_S)
            if client.shared is not None:
                shared_gradient(client.shared, ones_S.numel()).copy_(ones_S)
            put = None if client.shared is not None else as_bytes(ones_S)
            client.request({"op": "put"}, put, timeout_s=WAIT_S)
        span = read_answer(1, told).span
        assert span is not None
        quick[0].request(report_meta(StepReport(span, 1.0, 0.01, None)), timeout_s=WAIT_S)
        assert not torch.equal(site.shards[1].params_S, before_S)

        _, payload = slow[1].request(pull, timeout_s=WAIT_S)
        memory = slow[1].shared
        found_S = as_tensor(payload) if memory is None else shared_parameters(memory, size)
        assert torch.equal(found_S, before_S)


def test_a_shard_refuses_a_worker_that_was_replaced(tmp_path: Path) -> None:
    regions = [{"name": "us-east", "workers": 1, "ps_shards": 2}]
    with InProcess(experiment_of(regions=regions), tmp_path) as world:
        (site,) = world.sites.values()
        old, new = site.join(0, shared=False), site.join(0, attempt=2, shared=False)
        ones = as_bytes(torch.ones_like(site.shards[1].params_S))
        new[1].request({"op": "put"}, ones, timeout_s=WAIT_S)
        with pytest.raises(LinkDownError, match="replaced"):
            old[1].request({"op": "put"}, ones, timeout_s=WAIT_S)


# ------------------------------------------------------------------ workers that vanish


def test_a_worker_that_vanishes_in_mid_step_is_replaced(undisturbed: str, tmp_path: Path) -> None:
    with InProcess(experiment_of(), tmp_path) as world:
        site = world.sites["eu-west"]
        others = start_all(world, but="eu-west")
        mate = site.start(0)
        (lost,) = site.join(1, shared=False)
        assert join(lost, 1).span == Span(8, 8)
        lost.close()
        for worker in [*others, mate, site.start(1, attempt=2)]:
            worker.result()
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2


def test_the_answer_after_a_push_goes_to_the_replacement(undisturbed: str, tmp_path: Path) -> None:
    """The handler of the lost connection still waits for the answer when the new one joins."""
    with InProcess(experiment_of(), tmp_path) as world:
        site = world.sites["eu-west"]
        others = start_all(world, but="eu-west")
        clients = [site.join(rank, shared=False)[0] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:  # nobody gets rows before all are there
            first, second = pool.map(join, clients, (0, 1))
            assert first.span is not None and second.span is not None
            pushed = pool.submit(push_zeros, clients[1], site, second.span)
            eventually(lambda: site.server.work.pushes, "the push arrives")
            clients[1].close()
            assert isinstance(pushed.exception(WAIT_S), LinkDownError)
        replacements = [site.start(1, attempt=2), site.start(0, attempt=2)]
        for worker in [*others, *replacements]:
            worker.result()
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2


def test_a_worker_that_was_replaced_can_do_no_harm(undisturbed: str, tmp_path: Path) -> None:
    """It was only cut off for a while: its gradient comes after its replacement has joined."""
    with InProcess(experiment_of(), tmp_path) as world:
        site = world.sites["eu-west"]
        others = start_all(world, but="eu-west")
        old = [site.join(rank, shared=False)[0] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            spans = [answer.span for answer in pool.map(join, old, (0, 1))]
        assert spans == [Span(0, 8), Span(8, 8)]
        new = [site.join(rank, attempt=2, shared=False)[0] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            assert [answer.span for answer in pool.map(join, new, (0, 1))] == spans
        for client in old:
            with pytest.raises(LinkDownError, match="replaced"):
                push_zeros(client, site, Span(0, 8))
            with pytest.raises(LinkDownError, match="replaced"):
                join(client, 0)
        for worker in [*others, site.start(0, attempt=3), site.start(1, attempt=3)]:
            worker.result()
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2


# ------------------------------------------------------------------ errors reach the worker


def test_a_deadline_names_region_and_phase(tmp_path: Path) -> None:
    with InProcess(experiment_of(regions=ALONE), tmp_path, timeout_s=0.2) as world:
        lonely = world.sites["us-east"].start(0)  # its mate never comes
        with pytest.raises(DeadlineExceededError) as caught:
            lonely.result()
    assert "region 'us-east'" in caught.value.message
    assert "phase training" in caught.value.message
    assert "train.step_timeout_s" in caught.value.message


def test_an_averager_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """The other region never sends: all workers here learn which exchange it was."""
    timeout_s = 5.0  # the workers reach the exchange before it on a busy machine, too
    with InProcess(experiment_of(), tmp_path, timeout_s=timeout_s) as world:
        workers = [world.sites["eu-west"].start(rank) for rank in (0, 1)]
        for worker in workers:
            with pytest.raises(DeadlineExceededError, match="averager in 'us-east'") as caught:
                worker.result()
            assert "region 'eu-west'" in caught.value.message
        failure = world.sites["eu-west"].primary.status()["failure"]
        assert isinstance(failure, DeadlineExceededError)


@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_an_update_that_is_not_finite_is_refused_by_name(tmp_path: Path, region: str) -> None:
    """Beside the averager and far from it: the same error, and the averager's state stays."""
    with InProcess(experiment_of(), tmp_path) as world:
        site = world.sites[region]
        assert world.averager is not None
        site.shards[0].params_S.fill_(float("nan"))
        site.server.work.evals.every = 0  # an evaluation would notice first
        workers = [site.start(rank) for rank in (0, 1)]
        for worker in workers:
            with pytest.raises(NonFiniteError, match=f"region '{region}' is not finite"):
                worker.result()
        assert world.averager.state.version == 0


def test_a_lost_shard_reaches_every_worker(tmp_path: Path) -> None:
    regions = [{"name": "us-east", "workers": 2, "ps_shards": 2}]
    with InProcess(experiment_of(regions=regions), tmp_path) as world:
        site = world.sites["us-east"]
        loops = [site.loop(rank) for rank in (0, 1)]
        site.servers[0].close()  # the follower's
        workers = [WorkerThread(loop) for loop in loops]
        for worker in workers:
            worker.start()
        for worker in workers:
            with pytest.raises(LinkDownError):
                worker.result()


def test_an_update_in_the_name_of_another_region_is_refused(tmp_path: Path) -> None:
    with InProcess(experiment_of(), tmp_path) as world:
        bridge = world.sites["eu-west"].bridge_lan
        meta = {
            "op": "update",
            "region": "us-east",
            "attempt": 1,
            "seq": 1,
            "base_version": 0,
            "num_samples": 8,
            "final": False,
            "fragment": 0,
            "coded": None,
            "against": None,
            "steps": 1,
            "step_s": 0.1,
            "exchange_s": 0.0,
            "grad_sq": None,
        }
        client = LanClient(bridge.address, KEY, {"peer": "thief"})
        with client, pytest.raises(InvariantError, match="got an update of 'us-east'"):
            client.request(meta, as_bytes(torch.zeros(world.params_P.numel())))


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with InProcess(experiment_of(regions=ALONE), tmp_path) as world:
        site = world.sites["us-east"]
        world.parts.write_text("a file where the directory should be")
        site.primary.snapshot(1, halt=False)
        events: list[dict[str, object]] = []
        eventually(lambda: events.extend(site.event_buffer.take()) or events, "the failure")
        (event,) = [e for e in events if e["kind"] == "part_failed"]
        assert event["id"] == 1
        assert isinstance(event["error"], RunDirectoryError)
        assert world.run() != []  # training goes on
