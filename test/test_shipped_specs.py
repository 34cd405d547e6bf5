"""Every shipped spec trains, shortened as `override_spec(spec, 'test')` does it, and its state can be saved."""

import json

import pytest
from resume import TS

from slm_lab.experiment.session import Session
from slm_lab.lib import paths
from slm_lab.lib.state import check_tree
from slm_lab.spec import spec_util

SHIPPED = [
    (str(path.relative_to(paths.SPEC_DIR)), name)
    for path in sorted(paths.SPEC_DIR.rglob('*.json'))
    if not path.name.startswith('_')
    for name in json.loads(path.read_text())
]


@pytest.mark.parametrize(('file', 'name'), SHIPPED, ids=str)
def test_a_shipped_spec_trains(file, name, tmp_path):
    spec = spec_util.get(file, name, TS)
    spec['meta'].update(predir=str(tmp_path), random_seed=0)
    spec = spec_util.session_spec(spec_util.tick(spec_util.override_spec(spec, 'test'), 'trial'), 0)
    session = Session(spec, 'train', store=False)
    session.run()
    assert session.clock.frame >= 40 and len(session.agent.body.train_df) >= 4
    if session.agent.algorithm.NEEDS_NET:
        assert session.clock.opt_step > 0
    check_tree(session.state_dict())
