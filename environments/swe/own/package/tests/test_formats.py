import pytest
from intervals import (
    Interval,
    IntervalSet,
    format_duration,
    format_minutes,
    format_set,
    parse_duration,
    parse_set,
    parse_span,
)
from intervals.formats import parse_time


def test_parse_set():
    assert parse_set("[1, 5) [-2,0.5)") == IntervalSet.of((-2, 0.5), (1, 5))


def test_parse_set_refuses_other_text():
    with pytest.raises(ValueError, match="not an interval: '7'"):
        parse_set("[1, 5) 7")


def test_format_set_is_read_again():
    numbers = IntervalSet.of((1, 2.5), (4, 5))
    assert format_set(numbers) == "[1, 2.5) [4, 5)"
    assert parse_set(format_set(numbers)) == numbers


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("9:30", 570), ("14", 840), ("24:00", 1440), ("12 am", 0), ("12:05 pm", 725), ("2:15 PM", 855)],
)
def test_parse_time(text, minutes):
    assert parse_time(text) == minutes


@pytest.mark.parametrize("text", ["24:01", "9:60", "13 pm", "0 am", "noon"])
def test_parse_time_refuses(text):
    with pytest.raises(ValueError, match="not a"):
        parse_time(text)


def test_parse_span():
    assert parse_span("9:00-17:30") == Interval(540, 1050)


def test_a_span_over_midnight_ends_on_the_next_day():
    assert parse_span("22:00 - 2:00") == Interval(1320, 1560)


@pytest.mark.parametrize(("minutes", "text"), [(545, "09:05"), (1440, "24:00"), (1500, "01:00+1"), (0, "00:00")])
def test_format_minutes(minutes, text):
    assert format_minutes(minutes) == text


@pytest.mark.parametrize(("text", "minutes"), [("1h 30min", 90), ("2d1h", 2940), ("45m", 45)])
def test_parse_duration(text, minutes):
    assert parse_duration(text) == minutes


def test_parse_duration_refuses_other_text():
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration("1h and a half")


@pytest.mark.parametrize(("minutes", "text"), [(90, "1h 30min"), (1440, "1d"), (0, "0min"), (-61, "-1h 1min")])
def test_format_duration(minutes, text):
    assert format_duration(minutes) == text
