"""Specs of searches: the tiny run of `lab_process` with a `search` beside it."""

from lab_process import SPEC_NAME, make_spec

from slm_lab.spec import spec_util

GAMMA = 'agent.0.algorithm.gamma'
GRID = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.99]}}]}


def make_search(search=GRID, **changes):
    return {**make_spec(**changes), 'search': search}


def get_spec(search=GRID, **changes):
    return spec_util.prepare({**make_search(search, **changes), 'name': SPEC_NAME})
