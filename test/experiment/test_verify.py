"""`verify@`: trains again from the previous checkpoint to the newest, and tells whether they are identical."""

import json
import re
import time

import pytest
from resume import StopAt, build, go_on, hash_files, raw_spec, run_to, session_spec

import run_lab
from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.experiment.session import store_of
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.verify import verify_run
from slm_lab.lib.errors import LabError
from slm_lab.spec import spec_util

pytestmark = pytest.mark.usefixtures('command')


def run_verify(spec):
    """Returns: exit status; what it touches is an error."""
    before = hash_files(spec['meta']['predir'])
    status = run_lab.main(['spec.json', 'tiny', f'verify@{spec["meta"]["predir"]}'])
    assert hash_files(spec['meta']['predir']) == before
    return status


CASES = {
    'dqn': raw_spec('DQN'),
    'per, statistics, evaluation': raw_spec(
        'DoubleDQN', 'PrioritizedReplay', normalize_state=True, meta={'rigorous_eval': 2}
    ),
    'sarsa, several envs': raw_spec('SARSA', num_envs=4, algo={'action_pdtype': 'Categorical'}),
    'random': raw_spec('Random'),
}


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize(('frame', 'previous', 'newest'), [(150, 122, 150), (None, 244, 303), (122, 61, 122)])
def test_a_good_run_is_identical(name, frame, previous, newest, tmp_path, capsys):
    """Stopped between two rows, at its end, and at a row."""
    spec = session_spec(tmp_path, CASES[name])
    run_to(spec, *([] if frame is None else [StopAt(frame)]))
    assert run_verify(spec) == 0
    if spec['env'][0].get('num_envs', 1) == 1:
        assert f'tiny_t0_s0: frames {previous} to {newest}: identical' in capsys.readouterr().out
    else:
        assert re.search(r'tiny_t0_s0: frames \d+ to \d+: identical', capsys.readouterr().out)


def test_a_run_that_was_stopped_amid_an_evaluation_is_identical(tmp_path, capsys):
    """At frame 150, with its row due as well: its checkpoint has neither yet."""
    raw = raw_spec('DQN', meta={'rigorous_eval': 2, 'log_frequency': 50})
    spec = session_spec(tmp_path, raw)
    stopped = run_to(spec, StopAt(150))
    assert stopped['tree']['evaluated_frame'] == 100
    assert run_verify(spec) == 0
    assert 'frames 100 to 150: identical' in capsys.readouterr().out


def test_verifying_may_be_stopped_amid_an_evaluation(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 2}))
    run_to(spec, StopAt(150))
    with pytest.raises(LabError, match='stopped before it had a verdict'):
        verify_run(spec['meta']['predir'], StopRequest(deadline=time.time()))


def test_a_resumed_and_extended_run_is_identical(tmp_path, capsys):
    short = raw_spec('DQN', env={'max_frame': 150})
    run_to(session_spec(tmp_path, short))
    spec = session_spec(tmp_path, raw_spec('DQN'))
    go_on(spec, StopAt(170))
    spec_util.save(spec)
    assert run_verify(spec) == 0
    assert 'frames 150 to 170: identical' in capsys.readouterr().out


def test_a_dev_run_is_identical(tmp_path, capsys):
    """Which measures its gradients, and training again does so too."""
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150), mode='dev')
    assert run_verify(spec) == 0
    assert 'identical' in capsys.readouterr().out


def change(spec, edit, saver=None):
    """Saves the newest checkpoint once more, whole and with valid checksums, after `edit(tree)`.

    A `saver` that has restored nothing writes the whole memory, and not only the rows since the checkpoint before.
    """
    store = CheckpointStore(store_of(spec).folder)
    generation = store.find().generation
    session = build(spec, store=False)
    tree = store.restore(generation, session.state_dict())
    edit(tree)
    (store.folder / f'{generation.number:06d}_{generation.frame}_manifest.json').unlink()
    saver = saver or store
    saver.save(tree, frame=generation.frame, spec=generation.spec, final=generation.final)
    again = CheckpointStore(store.folder).find()
    assert again.generation.frame == generation.frame and not again.skipped


def edit_weight(tree):
    tree['agent']['algorithm']['nets']['net']['model.0.weight'][0, 0] += 1e-6


def edit_row(tree):
    tree['agent']['body']['rows']['train']['total_reward'][-1] += 1


def edit_generator(tree):
    tree['agent']['memory']['rng']['state']['state'] += 1


def edit_moment(tree):
    tree['agent']['algorithm']['optims']['net']['state'][0]['exp_avg'][0, 0] += 1e-6


def edit_counter(tree):
    tree['clock']['opt_step'] += 1


def edit_memory(tree):
    tree['agent']['memory']['ring'].arrays['rewards'][5] += 1


@pytest.mark.parametrize(
    ('edit', 'path'),
    [
        (edit_weight, 'agent.algorithm.nets.net.model.0.weight'),
        (edit_row, 'agent.body.rows.train.total_reward'),
        (edit_generator, 'agent.memory.rng.state.state'),
        (edit_moment, 'agent.algorithm.optims.net.state.0.exp_avg'),
        (edit_counter, 'clock.opt_step'),
    ],
)
def test_a_changed_checkpoint_differs_and_the_first_field_is_named(edit, path, tmp_path, capsys):
    spec = session_spec(tmp_path, CASES['per, statistics, evaluation'])
    run_to(spec, StopAt(150))
    change(spec, edit)
    assert run_verify(spec) == 1
    out = capsys.readouterr().out
    assert f'tiny_t0_s0: frames 122 to 150: differs first in {path}: ' in out
    assert ' in the checkpoint, ' in out and ' when trained again' in out


def test_a_saved_again_checkpoint_without_a_change_is_identical(tmp_path):
    """So it was the change that the test above found."""
    spec = session_spec(tmp_path, CASES['per, statistics, evaluation'])
    run_to(spec, StopAt(150))
    change(spec, lambda tree: None)
    assert run_verify(spec) == 0


def test_a_change_in_the_memory_is_found(tmp_path, capsys):
    """Its old rows lie in one file for both checkpoints, so the newest gets a file of its own."""
    spec = session_spec(tmp_path, CASES['dqn'])
    run_to(spec, StopAt(150))
    change(spec, edit_memory, CheckpointStore(store_of(spec).folder))
    assert run_verify(spec) == 1
    assert 'differs first in agent.memory.ring.rewards: ' in capsys.readouterr().out


def test_every_session_has_its_verdict(tmp_path, capsys):
    raw = raw_spec('DQN', meta={'max_session': 2})
    specs = [session_spec(tmp_path, raw, session) for session in (0, 1)]
    for spec in specs:
        run_to(spec, StopAt(150))
    change(specs[1], edit_counter)
    assert run_verify(specs[0]) == 1
    out = capsys.readouterr().out
    assert 'tiny_t0_s0: frames 122 to 150: identical' in out and 'tiny_t0_s1: frames 122 to 150: differs' in out


def test_the_run_of_another_spec_is_refused(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))
    spec_util.save(spec)
    folder = spec['meta']['predir']
    assert run_lab.main(['spec.json', 'tine', f'verify@{folder}']) == 2
    output = capsys.readouterr()
    assert output.err.endswith("is a run of spec 'tiny', not of 'tine'\n") and 'identical' not in output.out
    assert run_lab.main(['nowhere.json', 'tiny', f'verify@{folder}']) == 0  # the file may be gone, as for train@


def test_a_run_of_a_template_may_be_named_by_the_template(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    spec['name'] = 'all_CartPole-v1'
    spec_util.set_paths(spec)
    run_to(spec, StopAt(150))
    spec_util.save(spec)
    raw, spec_file = raw_spec('DQN', env={'name': '${env}'}), tmp_path / 'spec.json'
    specs = {name: {**raw, 'spec_params': {'env': envs}} for name, envs in TEMPLATES.items()}
    spec_file.write_text(json.dumps(specs))
    status = {name: run_lab.main([str(spec_file), name, f'verify@{spec["meta"]["predir"]}']) for name in TEMPLATES}
    assert status == {'all': 0, 'others': 2}


TEMPLATES = {'all': ['CartPole-v0', 'CartPole-v1'], 'others': ['CartPole-v1']}


def test_one_checkpoint_cannot_be_verified(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(0))
    assert run_verify(spec) == 2
    assert 'no session has two complete checkpoints' in capsys.readouterr().err


def test_an_env_that_does_not_repeat_itself_cannot_be_verified(tmp_path, capsys):
    """Which is not a difference: it is said by name."""
    spec = session_spec(tmp_path, raw_spec('DQN', env={'resume': 'episode'}))
    run_to(spec, StopAt(150))
    assert run_verify(spec) == 2
    assert "its env 'CartPole-v1' is not deterministic" in capsys.readouterr().err


def test_stopped_before_its_end_it_has_no_verdict(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))

    class AfterTen(StopRequest):
        asked = 0

        def __call__(self):
            self.asked += 1
            self.signal = 15 if self.asked > 10 else None
            return self.asked > 10

    with pytest.raises(LabError, match='stopped before it had a verdict') as raised:
        verify_run(spec['meta']['predir'], AfterTen())
    assert raised.value.exit_status == 143
