"""Differential transmission on the virtual clock: time won, losses sent again, equal ends."""

from __future__ import annotations

import pytest
import torch

from tests.support.world_support import BASE, Run

SMALL = {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}
LINK = {"rate_mbps": 0.4, "delay_s": 0.03}
TRAIN = BASE["train"] | {"steps": 12}


def sections(kind: str = "bsp", link: dict | None = None, **codec) -> dict:
    return {
        "strategy": {"kind": kind} | ({"interval": 2} if kind == "asgd_ga" else {}),
        "codec": {"up": SMALL | codec},
        "train": TRAIN,
        "emulate": {"link": LINK | (link or {}), "step_s": 0.5},
    }


def lossy_of(run: Run):
    lossy = run.world._lossy
    assert lossy is not None
    return lossy.books["b"].counts


def ends(run: Run) -> list[torch.Tensor]:
    assert run.result is not None
    return list(run.result.params_P.values())


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga"])
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_regions_end_equal_whatever_was_lost(simulated, kind: str, loss: float) -> None:
    run = simulated(**sections(kind, {"loss": loss}))
    a_P, b_P = ends(run)
    assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)
    assert lossy_of(run).late > 0


def test_rounds_take_as_long_as_their_reliable_part(simulated) -> None:
    part, whole = simulated(**sections()), simulated(**sections(loose="reliable"))
    assert torch.equal(*ends(part)) and torch.equal(*ends(whole))
    assert part.result.seconds < whole.result.seconds
    saved_s = 12 * 0.6 * 4 * ends(part)[0].numel() * 8e-6 / 0.4
    assert whole.result.seconds - part.result.seconds == pytest.approx(
        saved_s, rel=0.2
    )  # zeros are not sent


def test_all_reliable_has_the_bits_of_no_codec(simulated) -> None:
    plain = simulated(**(sections() | {"codec": {}}))
    assert torch.equal(ends(simulated(**sections(loose="reliable")))[0], ends(plain)[0])


def test_a_run_is_repeatable_to_the_bit(simulated) -> None:
    config = sections(link={"loss": 0.2})
    first, again = simulated(**config), simulated(**config)
    assert torch.equal(ends(first)[0], ends(again)[0])
    assert first.result.seconds == again.result.seconds


def test_what_does_not_fit_between_updates_is_sent_again(simulated) -> None:
    wide = {"task": {"use": "digits", "options": {"width": 32}}}
    slow = simulated(**(sections(rate_mbps=0.02) | wide))
    free = simulated(**(sections() | wide))
    # The final update contains everything that has not arrived by then; all else was in time.
    assert lossy_of(slow).too_late == lossy_of(slow).late / (TRAIN["steps"] - 2)
    assert 0 < lossy_of(slow).late < 0.7 * lossy_of(free).late


def test_loss_shows_in_the_books_and_not_in_the_time(simulated) -> None:
    clean, lossy = simulated(**sections()), simulated(**sections(link={"loss": 0.3}))
    assert lossy_of(lossy).late < 0.85 * lossy_of(clean).late


def test_dropped_at_the_sender_nothing_flows(simulated) -> None:
    run = simulated(**sections(loose="drop"))
    assert "loose" not in run.result.sent_bytes["b", "a"] and torch.equal(*ends(run))


def test_grace_lets_blocks_be_on_time(simulated) -> None:
    run = simulated(**sections(grace_s=10.0))
    count = lossy_of(run)
    assert count.on_time > 0 and count.late == 0
    ended = simulated(**sections(link={"loss": 0.5}, grace_s=0.2))
    assert lossy_of(ended).on_time > 0


def test_the_share_follows_the_loss(simulated) -> None:
    learning = {
        "data": BASE["data"] | {"batch_size": 16},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": TRAIN | {"steps": 60},
    }
    run = simulated(**(sections(adaptive=True, reliable_fraction_min=0.1) | learning))
    memory = run.world.regions["b"].server.wire._encoder.memory
    codec = run.config.codec.up
    assert 0.1 <= codec.present_fraction(memory) < 0.35
    sizes = [event["bytes_sent"] for event in run.of("exchange", "b")]
    assert len(sizes) == 60
