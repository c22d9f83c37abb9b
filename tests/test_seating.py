"""How many ranks of a scale-up domain are used, and that groups then sit evenly everywhere."""

from __future__ import annotations

import pytest

from stepgraph.hwtargets.links import group_geometry
from stepgraph.hwtargets.reading import load_target
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.seating import cuts_of, ranks_per_domain, seat, seating_note
from stepgraph.prediction import predict


@pytest.mark.parametrize(
    ("cuts", "domain", "used"),
    [
        ((), 72, 72),
        ((8, 64), 72, 72),  # all ranks fit in one domain
        ((8, 64, 512), 72, 64),  # 64 x 1
        ((32, 512), 72, 64),  # 32 x 2
        ((8, 128, 512), 72, 64),  # 8 x 9 = 72 does not divide 128, 64 does
        ((8, 512), 72, 72),  # 8 x 9: a group of 8 never straddles, and the last cut is all ranks
        ((8, 16, 64), 8, 8),
        ((6, 12), 8, 6),
        ((12,), 8, 8),  # one group of all ranks: 8 + 4
        ((9, 18), 8, 8),  # no divisor of 9 uses more than half a domain
    ],
)
def test_domains_are_filled_with_whole_groups(cuts: tuple[int, ...], domain: int, used: int) -> None:
    assert ranks_per_domain(cuts, domain) == used
    assert ranks_per_domain(cuts, used) == used  # seated once is seated


@pytest.mark.parametrize(("ep", "pp"), [(64, 8), (32, 16), (8, 16)])
def test_every_expert_group_of_a_rack_sits_alike(ep: int, pp: int) -> None:
    program = lower(load_model("deepseek-v3"), Layout(pp=pp, dp=512 // pp, ep=ep, global_batch=1024))
    machine = setting(load_target("gb200"))
    domain = seat(machine, program).target.scale_up.domain
    assert domain is not None and max(cuts_of(program)) == 512
    for first in range(0, 512, ep):  # every group, also those of later stages
        assert group_geometry(range(first, first + ep), domain).domains == 1


def test_the_user_is_told() -> None:
    layout = Layout(pp=8, dp=64, ep=64, global_batch=1024)
    notes = predict("deepseek-v3", layout, "gb200").notes
    assert "64 of the 72 GPUs of each scale-up domain are used, so that no group straddles two unevenly" in notes
    assert not seating_note(load_target("h100"), load_target("h100"))
