"""A run that is killed again and again ends as one that never was. `make soak` does this for as long as one likes."""

from __future__ import annotations

from faults.campaign import STEPS, Campaign
from faults.forks import Server


def test_killed_in_saves_in_rotations_and_anywhere_a_run_ends_as_if_it_never_was(server: Server, tmp_path) -> None:
    campaign = Campaign(server, tmp_path, seed=1)
    counts = campaign.counts
    while counts.kills < 8 or not counts.cycles or not counts.in_saves or not counts.in_rotations:
        campaign.step()
    assert counts.in_saves >= 2 and counts.in_rotations >= 1 and counts.from_checkpoint > 3, counts
    assert len(counts.steps) > 3 and max(counts.steps) <= STEPS
