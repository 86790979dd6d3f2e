"""How often a costly reading is made, against a clock that tests move."""

from __future__ import annotations

from paceline.telemetry.seldom import Clocks, Seldom


class Reading:
    """Counts how often it is made; each takes `cost_s` of CPU."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.made = 0
        self._cpu_s = 0.0
        self._cost_s = cost_s
        self.seldom = Seldom(
            self._make,
            Clocks(monotonic_s=lambda: self.now_s, cpu_s=lambda: self._cpu_s),
        )

    def _make(self) -> int:
        self._cpu_s += self._cost_s
        self.made += 1
        return self.made

    def at(self, now_s: float, *, fresh: bool = False) -> int:
        self.now_s = now_s
        return self.seldom.get(fresh=fresh)


def test_ten_ticks_a_second_read_once_a_second_and_repeat() -> None:
    reading = Reading()
    assert [reading.at(tick / 10) for tick in range(25)] == [1] * 10 + [2] * 10 + [3] * 5


def test_tick_that_comes_early_is_not_left_out() -> None:
    reading = Reading()
    assert [reading.at(now_s) for now_s in (0.0, 0.999, 2.001, 2.96)] == [1, 2, 3, 4]


def test_fresh_reading_does_not_wait_for_its_turn() -> None:
    reading = Reading()
    assert [reading.at(0.0), reading.at(0.1, fresh=True), reading.at(0.2)] == [1, 2, 2]


def test_costly_reading_is_made_so_seldom_that_it_takes_its_share_even_where_asked_for() -> None:
    reading = Reading(cost_s=0.002)  # 0.05 % of a core: every 4 s
    assert [reading.at(now_s) for now_s in (0.0, 1.0, 3.9, 4.1, 6.0, 8.2)] == [1, 1, 1, 2, 2, 3]
    assert reading.at(9.0, fresh=True) == 3
    assert reading.at(12.3, fresh=True) == 4
