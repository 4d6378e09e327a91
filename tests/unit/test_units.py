"""Numbers from people: what is taken, what is refused, and that refusals stay one short line."""

from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import units
from mgpu.errors import BadInput
from mgpu.model import MIB

EXAMPLE = "write whole MiB, such as 4096"


def whole(value, least=1):
    return units.whole_number(value, "memory", EXAMPLE, least=least)


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1), ("1", 1), (4096, 4096), ("4096", 4096), ("0030", 30), (10**9, 10**9)],
)
def test_takes_json_integers_and_ascii_digits(value, number):
    assert whole(value) == number


@pytest.mark.parametrize(
    "value",
    [
        "30.5", 30.5, 30.0, "1e3", 1e3, float("nan"), float("inf"), "nan", "inf",
        "", " ", " 30", "30 ", "30\n", "\n30", "+30", "--1", "0x10", "1_000", "3,0", "3'000",
        "4096MiB", "4Gi", "30%", "٣", "３０", "²", "Ⅳ", "十", "abc", "\x00", "30\x00",
        None, True, False, [], [30], {}, {"core": 30}, b"30", (30,),
    ],
)  # fmt: skip
def test_refuses_what_is_no_whole_number(value):
    with pytest.raises(BadInput) as caught:
        whole(value)
    assert caught.value.reason == "not a whole number"
    assert str(caught.value).startswith("memory ")
    assert str(caught.value).endswith("; " + EXAMPLE)


@pytest.mark.parametrize(
    "value", [0, "0", "00", -1, "-1", -(10**6), "-30", "-0", -(10**30), "-" + "9" * 60000]
)
def test_refuses_what_is_below_the_least(value):
    with pytest.raises(BadInput) as caught:
        whole(value)
    assert caught.value.reason == "below the least, 1"


def test_least_is_taken():
    assert whole("0", least=0) == 0


@pytest.mark.parametrize(
    "value", [10**9 + 1, 10**30, "9" * 11, "9" * 60000, 10**60000], ids=lambda _: ""
)
def test_refuses_huge_numbers_in_a_short_line(value):
    with pytest.raises(BadInput) as caught:
        whole(value)
    assert caught.value.reason == "far beyond any card"
    assert len(str(caught.value)) < 150


def test_an_enum_is_shown_as_what_it_is_and_counts_as_its_number():
    number = IntEnum("number", {"four": 4}).four
    assert whole(number) == 4


@given(
    st.one_of(
        st.text(),
        st.binary(),
        st.integers(),
        st.floats(),
        st.none(),
        st.booleans(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.integers()),
    )
)
def test_any_input_gives_a_number_in_range_or_one_short_printable_line(value):
    try:
        number = whole(value)
    except BadInput as error:
        line = str(error)
        assert len(line) < 150
        assert line.isascii() and line.isprintable()
    else:
        assert type(number) is int
        assert 1 <= number <= 10**9


@given(st.integers(min_value=1, max_value=10**9))
def test_text_and_number_mean_the_same(number):
    assert whole(str(number)) == whole(number) == number


def test_shown_keeps_short_text_and_marks_what_it_cut():
    assert units.shown("docker") == "'docker'"
    assert units.shown("a" * 38) == "'" + "a" * 38 + "'"
    assert units.shown("a" * 39) == "'" + "a" * 36 + "..."
    assert units.shown(2**200) == "a number of 201 bits"


def test_free_is_rounded_down_and_used_up():
    assert units.mib_down(MIB - 1) == 0
    assert units.mib_down(5 * MIB) == 5
    assert units.mib_up(1) == 1
    assert units.mib_up(0) == 0
    assert units.mib_up(5 * MIB) == 5
    assert units.mib_text(4096) == "4096 MiB"


@given(st.integers(1, 10**6), st.data())
def test_used_and_free_of_a_whole_mib_limit_add_up(limit_mib, data):
    used = data.draw(st.integers(0, limit_mib * MIB))
    assert units.mib_up(used) + units.mib_down(limit_mib * MIB - used) == limit_mib
