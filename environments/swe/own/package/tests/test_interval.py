import pytest
from intervals import Interval


def test_length():
    assert Interval(2, 5).length == 3


def test_the_end_must_not_precede_the_start():
    with pytest.raises(ValueError, match="cannot end before"):
        Interval(3, 2)


def test_start_belongs_to_the_interval_and_end_does_not():
    assert 2 in Interval(2, 5)
    assert 5 not in Interval(2, 5)


@pytest.mark.parametrize(("other", "expected"), [((2, 5), True), ((3, 4), True), ((1, 4), False), ((3, 6), False)])
def test_covers(other, expected):
    assert Interval(2, 5).covers(Interval(*other)) is expected


def test_an_empty_interval_is_covered_everywhere():
    assert Interval(2, 5).covers(Interval(9, 9))


def test_neighbours_touch_and_do_not_overlap():
    assert Interval(1, 3).touches(Interval(3, 4))
    assert not Interval(1, 3).overlaps(Interval(3, 4))


def test_intersection():
    assert Interval(1, 5).intersection(Interval(3, 8)) == Interval(3, 5)
    assert Interval(1, 2).intersection(Interval(2, 3)) is None


@pytest.mark.parametrize(("other", "expected"), [((8, 9), 3), ((0, 1), 1), ((4, 9), 0), ((5, 6), 0)])
def test_gap(other, expected):
    assert Interval(2, 5).gap(Interval(*other)) == expected


def test_shifted():
    assert Interval(2, 5).shifted(-2) == Interval(0, 3)


def test_widened_on_both_sides():
    assert Interval(10, 20).widened(3) == Interval(7, 23)


def test_widened_with_two_margins():
    assert Interval(10, 20).widened(1, 0) == Interval(9, 20)


@pytest.mark.parametrize(("value", "expected"), [(1, 2), (3, 3), (7, 5)])
def test_clamp(value, expected):
    assert Interval(2, 5).clamp(value) == expected


def test_pieces_with_a_shorter_rest():
    assert Interval(0, 5).pieces(2) == [Interval(0, 2), Interval(2, 4), Interval(4, 5)]


def test_pieces_without_the_rest():
    assert Interval(0, 5).pieces(2, keep_rest=False) == [Interval(0, 2), Interval(2, 4)]


def test_pieces_that_fit_exactly():
    assert Interval(1, 5).pieces(2, keep_rest=False) == [Interval(1, 3), Interval(3, 5)]


def test_pieces_need_a_positive_size():
    with pytest.raises(ValueError, match="size must be positive"):
        Interval(0, 5).pieces(0)
