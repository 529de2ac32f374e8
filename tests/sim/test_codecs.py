"""Codecs in simulated runs: the same bits where nothing is lost, fewer bytes and equal ends."""

from __future__ import annotations

import pytest
from world_support import BASE

from geo_ray.sync.registry import STRATEGIES

TRAIN = BASE["train"] | {"steps": 9}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_identity_is_no_codec_to_the_bit(simulated, kind):
    sections = {"strategy": {"kind": kind}, "train": TRAIN}
    plain = simulated(**sections)
    both = {"up": {"kind": "identity"}, "down": {"kind": "identity"}}
    coded = simulated(**sections, codec=both)
    assert coded.digests() == plain.digests()
    assert coded.result.sent_bytes == plain.result.sent_bytes
    assert [e.fields for e in coded.of("exchange")] == [e.fields for e in plain.of("exchange")]
