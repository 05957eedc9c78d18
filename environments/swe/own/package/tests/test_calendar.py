import pytest
from intervals import Interval, IntervalSet, busy_from_meetings, common_slots, first_slot, free_slots, split_by_day
from intervals.calendar import busiest_day, load_by_day

HOURS = Interval(540, 1020)


@pytest.fixture
def calendars():
    return {
        "Ana": busy_from_meetings(["9:00-10:10", "13:00-14:00"]),
        "Bo": busy_from_meetings(["9:30-11:00", "16:00-17:00"]),
    }


def test_busy_times_of_meetings():
    assert busy_from_meetings(["9:00-10:00", "9:30-11:00"]) == IntervalSet.of((540, 660))


def test_margins_of_meetings_end_at_midnight():
    assert busy_from_meetings(["0:05-1:00"], margin=10) == IntervalSet.of((0, 70))


def test_free_slots_lie_within_working_hours():
    busy = busy_from_meetings(["8:00-9:30", "12:00-13:00"])
    assert free_slots(busy, HOURS) == [Interval(570, 720), Interval(780, 1020)]


def test_short_free_slots_are_dropped():
    busy = busy_from_meetings(["9:20-12:00", "12:30-17:00"])
    assert free_slots(busy, HOURS, at_least=30) == [Interval(720, 750)]


def test_common_slots(calendars):
    assert common_slots(calendars, HOURS) == [Interval(660, 780), Interval(840, 960)]


def test_first_slot(calendars):
    assert first_slot(calendars, HOURS, 60) == Interval(660, 720)


def test_first_slot_after_a_time(calendars):
    assert first_slot(calendars, HOURS, 60, after=721) == Interval(840, 900)


def test_first_slot_starts_at_a_multiple_of_the_step():
    assert first_slot({"Ana": busy_from_meetings(["9:00-9:40"])}, HOURS, 30) == Interval(585, 615)
    assert first_slot({"Ana": busy_from_meetings(["9:00-9:40"])}, HOURS, 30, step=20) == Interval(580, 610)


def test_no_slot_is_long_enough(calendars):
    assert first_slot(calendars, HOURS, 150) is None


def test_a_slot_may_fill_the_gap(calendars):
    assert first_slot(calendars, HOURS, 120) == Interval(660, 780)


def test_split_by_day():
    assert split_by_day(Interval(1380, 2940)) == [
        (0, Interval(1380, 1440)),
        (1, Interval(0, 1440)),
        (2, Interval(0, 60)),
    ]


def test_load_by_day():
    assert load_by_day([Interval(0, 720), Interval(360, 720), Interval(1440, 1800)], 3) == [0.5, 0.25, 0]


def test_load_ignores_later_days():
    assert load_by_day([Interval(1080, 4000)], 1) == [0.25]


def test_busiest_day():
    assert busiest_day([Interval(0, 60), Interval(1500, 1600), Interval(3000, 3100)], 3) == 1
    assert busiest_day([], 3) is None
