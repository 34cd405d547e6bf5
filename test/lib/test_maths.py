"""Formulas against values worked out by hand."""

import torch

from slm_lab.lib.maths import dueling_q


def test_dueling_q_takes_the_mean_advantage_off():
    v = torch.tensor([[1.0], [2.0], [3.0]])
    adv = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert dueling_q(v, adv).tolist() == [[0.5, 1.5], [2.0, 2.0], [3.5, 2.5]]
