"""The figures are worked out by hand from the meaning of each argument."""

from mgpu.unseen import unseen_bytes

KEY = (100, 1)


def test_the_driver_reports_more_than_was_counted():
    assert unseen_bytes({KEY: 10}, {KEY: 25}, {KEY: 10}, {}) == {KEY: 15}


def test_a_process_that_was_never_counted_is_charged_whole():
    assert unseen_bytes({}, {KEY: 25}, {}, {}) == {KEY: 25}


def test_the_driver_lags_behind_and_charges_nothing():
    assert unseen_bytes({KEY: 30}, {KEY: 25}, {KEY: 30}, {KEY: 7}) == {}


def test_a_figure_that_moved_keeps_its_last_charge():
    assert unseen_bytes({KEY: 10}, {KEY: 25}, {KEY: 12}, {KEY: 7}) == {KEY: 7}
    assert unseen_bytes({KEY: 10}, {KEY: 25}, {KEY: 12}, {}) == {}


def test_a_process_that_has_gone_is_charged_nothing():
    assert unseen_bytes({KEY: 10}, {}, {}, {KEY: 7}) == {}


def test_agreement_charges_nothing():
    assert unseen_bytes({KEY: 10}, {KEY: 10}, {KEY: 10}, {}) == {}
