"""The end of an error line: the nearest known name, and all of them."""

import pytest

from slm_lab.lib.errors import LabError, ResumeError, SpecError, suggest


@pytest.mark.parametrize(
    ('name', 'known', 'expected'),
    [
        ('MLPnet', ['MLPNet', 'DuelingMLPNet'], "; did you mean 'MLPNet'? Known: DuelingMLPNet, MLPNet"),
        ('gama', ('gamma', 'lam'), "; did you mean 'gamma'? Known: gamma, lam"),
        ('xyz', ['gamma', 'alpha'], '. Known: alpha, gamma'),
        ('x', [], '. Known: none'),
        (None, [None, 'concat'], "; did you mean 'None'? Known: None, concat"),
    ],
)
def test_suggest_names_the_nearest_and_lists_all(name, known, expected):
    assert suggest(name, known) == expected


def test_one_except_clause_catches_what_a_user_can_mend():
    assert issubclass(SpecError, LabError) and issubclass(ResumeError, LabError)
