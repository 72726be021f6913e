"""Examples of Hypothesis every day and at night."""

from hypothesis import settings

from tests.helpers.examples import examples


def test_a_night_tries_five_times_as_many():
    at_present = settings.get_current_profile_name()
    counts = {}
    for name in ("every day", "night"):
        settings.load_profile(name)
        counts[name] = (settings.default.max_examples, examples(40))
    settings.load_profile(at_present)
    assert counts == {"every day": (200, 40), "night": (1000, 200)}
