"""Suite ``plan`` on a smaller model, once."""

import pytest

from memkv_pp.bench import plan
from memkv_pp.plan.request import OBJECTIVES


@pytest.mark.slow
def test_the_suite_times_each_objective_on_equal_and_uneven_devices():
    small, *rows = plan.run(rounds=1, num_layers=24, num_devices=3)
    assert (small.name, small.peer, small.unit) == ("plan/16x4/capacity", "every-fence", "ms")
    assert small.ratio == small.peer_value / small.ours > 1
    assert [row.name for row in rows] == [
        f"plan/24x3/{objective}/{devices}"
        for objective in OBJECTIVES
        for devices in ("equal", "uneven")
    ]
    assert {(row.peer, row.peer_value, row.unit) for row in rows} == {("second", 1.0, "s")}
    assert all(row.ratio == 1 / row.ours for row in rows)
