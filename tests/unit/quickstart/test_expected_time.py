import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from lightning_dalle.quickstart import expected_time
from lightning_dalle.quickstart.expected_time import (
    REFERENCE,
    TYPICAL_SECONDS,
    Pace,
    RemainingTime,
    explain_slow_stages,
    format_minutes,
    seconds_without_training,
    slow_reasons,
)
from lightning_dalle.quickstart.machine import MachineSpeed
from tests.unit.quickstart.clocks import Clock

PACE = Pace(start_seconds=3.0, update_seconds=0.3, validation_seconds=12.0, updates=1500, validations=2)
TITLES = {"contrastive": "Reranker", "text_to_image": "Transformer", "report": "Report"}
TYPICAL = {"contrastive": 100.0, "text_to_image": 500.0, "report": 1.0}


@pytest.mark.parametrize(
    ("seconds", "text"), [(10, "under a minute"), (50, "about 1 min"), (95, "about 2 min"), (600, "about 10 min")]
)
def test_minutes_in_words(seconds: float, text: str) -> None:
    assert format_minutes(seconds) == text


def test_a_stage_takes_its_start_its_updates_and_its_validations() -> None:
    assert PACE.stage_seconds() == pytest.approx(3 + 1500 * 0.3 + 2 * 12)


def test_a_resumed_stage_takes_what_is_left_of_it() -> None:
    assert PACE.stage_seconds(done=1000) == pytest.approx(3 + 500 * 0.3 + 12)


def test_a_validation_is_ahead_until_the_update_after_it() -> None:
    left = [PACE.seconds_of_validations(done) / PACE.validation_seconds for done in (0, 749, 750, 751, 1500)]
    assert left == [2, 2, 2, 1, 1]


@dataclass(frozen=True)
class Machine:
    """How a simulated machine runs a stage, which its rehearsal has found as `PACE` says."""

    steady: float = 0.3
    slow_updates: int = 0
    updates_per_epoch: int = 1562
    first_epoch: float = 1.0
    hiccups: int = 0
    validation: float = 12.0

    def seconds(self, update: int, done_before: int) -> float:
        if update - done_before < self.slow_updates:
            return 5 * self.steady
        if self.hiccups and update % self.hiccups == 0:
            return 3 * self.steady
        wobble = 1 + 0.2 * (-1) ** update
        return self.steady * wobble * (self.first_epoch if update - done_before < self.updates_per_epoch else 1)


def train(machine: Machine, clock: Clock, done: int = 0) -> Iterator[float]:
    """Run the updates after `done`, and give what is said to be left each time that the bar moves."""
    remaining = RemainingTime(PACE, machine.updates_per_epoch, clock)
    yield remaining.seconds(done)
    for update in range(done, PACE.updates):
        clock.pass_seconds(machine.seconds(update, done))
        remaining.end_update()
        yield remaining.seconds(update + 1)
        if (update + 1) % (PACE.updates // PACE.validations) == 0:
            remaining.start_validation()
            clock.pass_seconds(machine.validation)
            remaining.end_validation()


MACHINES = {
    "constant speed": Machine(),
    "slow first updates": Machine(slow_updates=8),
    "cold caches in the first epoch": Machine(slow_updates=3, updates_per_epoch=114, first_epoch=2.0),
    "a slow update now and then": Machine(hiccups=10),
    "long validations": Machine(slow_updates=8, validation=40.0),
    "slower than rehearsed": Machine(steady=0.36, slow_updates=5, updates_per_epoch=28),
}


@pytest.mark.parametrize("done", [0, 1000])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_the_total_is_true_from_the_first_that_is_shown_and_does_not_jump(machine: Machine, done: int) -> None:
    clock = Clock()
    start = clock.now
    shown = [clock.now - start + left for left in train(machine, clock, done)]
    total = clock.now - start
    assert len(shown) == PACE.updates - done + 1
    assert all(abs(seconds - total) < 0.25 * total for seconds in shown)
    assert all(abs(later - earlier) < 0.15 * total for earlier, later in pairwise(shown))


def test_what_is_left_follows_a_machine_that_has_become_slower() -> None:
    clock = Clock()
    remaining = RemainingTime(PACE, 1562, clock)
    for _ in range(expected_time.RECENT_UPDATES):
        clock.pass_seconds(0.6)
        remaining.end_update()
    assert remaining.seconds(500) == pytest.approx(1000 * 0.6 + 24)


def test_pauses_for_validation_are_no_part_of_updates() -> None:
    clock = Clock()
    remaining = RemainingTime(PACE, 1562, clock)
    for _ in range(expected_time.RECENT_UPDATES):
        clock.pass_seconds(0.6)
        remaining.end_update()
        remaining.start_validation()
        clock.pass_seconds(20.0)
        remaining.end_validation()
    assert remaining.seconds(1000) == pytest.approx(500 * 0.6 + 20)


def test_the_whole_run_is_true_over_several_stages() -> None:
    clock = Clock()
    start, shown, stages = clock.now, [], 3
    machine = Machine(slow_updates=6, hiccups=50)
    for stage in range(stages):
        later = (stages - 1 - stage) * PACE.stage_seconds()
        shown.append(clock.now - start + PACE.stage_seconds() + later)
        clock.pass_seconds(PACE.start_seconds)
        shown += [clock.now - start + left + later for left in train(machine, clock)]
    total = clock.now - start
    assert all(abs(seconds - total) < 0.25 * total for seconds in shown)


def speed(**changes: float) -> MachineSpeed:
    return dataclasses.replace(REFERENCE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": 1}, "only 1 core can be used"),
        ({"cores": 1.5}, "only 1.5 cores can be used"),
        ({"core_share": 0.3, "load": 6.8}, "other processes use the cores, 30% of their time is ours (load 6.8)"),
        ({"core_gflops": 12.0}, "a core makes 12 GFLOP/s, typically 50: it is throttled, or of an older kind"),
        ({}, "no reason was found, cores are free and as fast as usual"),
    ],
)
def test_a_slow_machine_has_its_reason(changes: dict[str, float], words: str) -> None:
    assert slow_reasons(speed(**changes)) == [words]


@pytest.mark.parametrize(("typical", "named"), [(True, True), (False, False)])
def test_bfloat16_is_missed_only_where_the_typical_times_had_it(
    monkeypatch: pytest.MonkeyPatch, typical: bool, named: bool
) -> None:
    here = speed(cores=1, fast_bfloat16=False)
    monkeypatch.setattr(expected_time, "REFERENCE", speed(fast_bfloat16=typical))
    assert ("this processor does not multiply fast in bfloat16" in slow_reasons(here)) is named


def test_one_line_names_all_slow_stages_and_all_reasons() -> None:
    expected = {"contrastive": 300.0, "text_to_image": 2400.0}
    assert explain_slow_stages(expected, TYPICAL, TITLES, speed(cores=1, core_gflops=20.0)) == (
        "Slow here: Reranker (about 5 min, typically about 2 min), Transformer (about 40 min, typically about 8 min): "
        "only 1 core can be used; a core makes 20 GFLOP/s, typically 50: it is throttled, or of an older kind."
    )


@pytest.mark.parametrize("expected", [{"contrastive": 199.0, "text_to_image": 999.0}, {"report": 40.0}])
def test_what_is_not_far_slower_or_not_waited_for_needs_no_line(expected: dict[str, float]) -> None:
    assert explain_slow_stages(expected, TYPICAL, TITLES, speed(cores=1)) is None


def test_stages_without_training_follow_the_speed_of_products() -> None:
    typical = TYPICAL_SECONDS["shapes"]["pictures"]
    assert seconds_without_training("shapes", "pictures", REFERENCE) == typical
    assert seconds_without_training("shapes", "pictures", speed(core_share=0.5)) == pytest.approx(2 * typical)
