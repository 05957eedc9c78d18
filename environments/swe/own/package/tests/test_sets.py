from intervals import Interval, IntervalSet


def test_touching_intervals_become_one():
    assert list(IntervalSet.of((4, 6), (1, 4))) == [Interval(1, 6)]


def test_an_inner_interval_changes_nothing():
    assert IntervalSet.of((1, 9), (2, 3)) == IntervalSet.of((1, 9))


def test_empty_intervals_are_dropped():
    assert len(IntervalSet.of((3, 3))) == 0


def test_contains():
    numbers = IntervalSet.of((1, 3), (5, 7))
    assert [value for value in range(9) if value in numbers] == [1, 2, 5, 6]


def test_length_counts_overlaps_once():
    assert IntervalSet.of((0, 4), (2, 6), (10, 11)).length == 7


def test_hull():
    assert IntervalSet.of((5, 7), (1, 2)).hull == Interval(1, 7)
    assert IntervalSet().hull is None


def test_union():
    assert IntervalSet.of((1, 3)) | IntervalSet.of((2, 5), (8, 9)) == IntervalSet.of((1, 5), (8, 9))


def test_intersection_of_sets():
    assert IntervalSet.of((0, 5), (8, 12)) & IntervalSet.of((3, 9), (11, 20)) == IntervalSet.of(
        (3, 5), (8, 9), (11, 12)
    )


def test_difference_cuts_holes():
    assert IntervalSet.of((0, 10)) - IntervalSet.of((2, 3), (5, 6)) == IntervalSet.of((0, 2), (3, 5), (6, 10))


def test_difference_at_the_borders():
    assert IntervalSet.of((0, 10)) - IntervalSet.of((-5, 2), (9, 20)) == IntervalSet.of((2, 9))


def test_difference_with_a_superset_is_empty():
    assert IntervalSet.of((2, 3)) - IntervalSet.of((0, 10)) == IntervalSet()


def test_symmetric_difference():
    assert IntervalSet.of((0, 4)) ^ IntervalSet.of((2, 6)) == IntervalSet.of((0, 2), (4, 6))


def test_complement():
    assert IntervalSet.of((2, 4)).complement(Interval(0, 5)) == IntervalSet.of((0, 2), (4, 5))


def test_gaps():
    numbers = IntervalSet.of((0, 1), (2, 3), (7, 8))
    assert numbers.gaps() == [Interval(1, 2), Interval(3, 7)]
    assert numbers.gaps(at_least=4) == [Interval(3, 7)]


def test_closed_gaps():
    assert IntervalSet.of((0, 1), (2, 3), (7, 8)).closed_gaps(1) == IntervalSet.of((0, 3), (7, 8))


def test_the_first_of_two_longest_intervals():
    assert IntervalSet.of((0, 1), (2, 5), (6, 9)).longest() == Interval(2, 5)


def test_equal_sets_have_equal_hashes():
    assert len({IntervalSet.of((1, 2), (2, 3)), IntervalSet.of((1, 3))}) == 1


def test_repr():
    assert repr(IntervalSet.of((1, 2), (4, 5))) == "IntervalSet([1, 2), [4, 5))"
