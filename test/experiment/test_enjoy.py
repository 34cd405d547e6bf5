"""`enjoy@`: plays the best nets of a run with the observation statistics that they play by, and writes nothing."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from resume import StopAt, hash_files, raw_spec, run_to, session_spec

import run_lab
from slm_lab.experiment import enjoy
from slm_lab.experiment.session import store_of
from slm_lab.lib.state import first_difference, snapshot
from slm_lab.spec import spec_util

pytestmark = pytest.mark.usefixtures('command')


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with one trial's two sessions, each stopped at 250: their specs"""
    folder = tmp_path_factory.mktemp('trained')
    raw = raw_spec('DQN', normalize_state=True, env={'reward_scale': 0.1}, meta={'max_session': 2})
    specs = [session_spec(folder, raw, session) for session in (0, 1)]
    for spec in specs:
        run_to(spec, StopAt(250))
    for unit in ('tiny', 'tiny_t0'):
        shutil.copy(f'{specs[0]["meta"]["prepath"]}_spec.json', Path(specs[0]['meta']['predir']) / f'{unit}_spec.json')
    return specs


@pytest.fixture
def played(monkeypatch):
    """What is played: the nets, the statistics, and the name of the session."""
    seen = {}
    original = enjoy._load_best

    def load(session, spec):
        original(session, spec)
        seen['name'] = spec_util.unit_name(spec)
        seen['nets'] = snapshot({name: dict(net.state_dict()) for name, net in session.agent.algorithm.nets.items()})
        env = session.env
        while env is not env.unwrapped:
            seen['statistics'] = getattr(env, 'statistics', None) or seen.get('statistics')
            env = env.env
        seen['statistics'] = seen['statistics'] and snapshot(seen['statistics'].state_dict())

    monkeypatch.setattr(enjoy, '_load_best', load)
    return seen


def best_of(spec):
    return store_of(spec).best(store_of(spec).find().generation)


def run_enjoy(what):
    return run_lab.main(['spec.json', 'tiny', f'enjoy@{what}'])


def test_it_plays_the_best_nets_with_their_statistics(trained, played, capsys):
    folder = trained[0]['meta']['predir']
    before = hash_files(folder)
    assert run_enjoy(folder) == 0
    best = max((best_of(spec) for spec in trained), key=lambda best: best['value'])
    for name in ('net', 'target_net'):
        assert first_difference(dict(best['nets'][f'{name}_model']), played['nets'][name]) is None
    assert first_difference(best['nets']['statistics']['NormalizeState'], played['statistics']) is None
    out = capsys.readouterr().out
    assert f'Playing the best nets, of frame {best["frame"]}, return {best["value"]:g}' in out
    returns = [float(value) for value in re.findall(r'episode \d+: return (\S+)', out)]
    assert returns and all(1 <= value <= 30 for value in returns)  # of raw rewards: 1 a step, 30 steps at most
    assert f'{len(returns)} episodes, mean return {sum(returns) / len(returns):g}' in out
    assert hash_files(folder) == before


def test_the_statistics_are_those_of_the_best_and_not_of_the_end(trained):
    for spec in trained:
        best = best_of(spec)
        # one for each step and two for each reset: its frame and the episodes that ended by then
        assert best['frame'] < best['nets']['statistics']['NormalizeState']['count'] < 250


def test_the_best_session_is_played(trained, played):
    values = [best_of(spec)['value'] for spec in trained]
    assert values[0] != values[1]
    run_enjoy(trained[0]['meta']['predir'])
    assert played['name'] == f'tiny_t0_s{values.index(max(values))}'


@pytest.mark.parametrize('session', [0, 1])
def test_a_session_is_named_by_its_spec(session, trained, played):
    prepath = trained[session]['meta']['prepath']
    before = hash_files(trained[0]['meta']['predir'])
    assert run_enjoy(f'{prepath}_spec.json') == 0
    assert played['name'] == f'tiny_t0_s{session}'
    assert hash_files(trained[0]['meta']['predir']) == before


@pytest.mark.parametrize('unit', ['tiny_t0', 'tiny'])
def test_the_spec_of_a_trial_or_of_the_run_means_its_best_session(unit, trained, played):
    folder = Path(trained[0]['meta']['predir'])
    values = [best_of(spec)['value'] for spec in trained]
    assert run_enjoy(folder / f'{unit}_spec.json') == 0
    assert played['name'] == f'tiny_t0_s{values.index(max(values))}'


def test_the_spec_of_a_trial_means_no_other_trial(trained, played, tmp_path):
    """Trial 1 is here, and would be better; and `t0_s1` is not `t0_s10`."""
    folder = tmp_path / 'data' / Path(trained[0]['meta']['predir']).name
    shutil.copytree(trained[0]['meta']['predir'], folder)
    values = [best_of(spec)['value'] for spec in trained]
    better = trained[values.index(max(values))]['meta']['prepath']
    for path in list(Path(folder).rglob(f'{Path(better).name}*')):
        shutil.move(path, str(path).replace(Path(better).name, 'tiny_t1_s10'))
    assert run_enjoy(folder / 'tiny_t0_spec.json') == 0
    assert played['name'] == f'tiny_t0_s{values.index(min(values))}'
    assert run_enjoy(folder) == 0
    assert played['name'] == 'tiny_t1_s10'


def test_the_spec_of_session_1_does_not_mean_session_10(trained, played, tmp_path):
    folder = tmp_path / 'data' / Path(trained[0]['meta']['predir']).name
    shutil.copytree(trained[0]['meta']['predir'], folder)
    values = [best_of(spec)['value'] for spec in trained]
    better, worse = values.index(max(values)), values.index(min(values))
    for session, name in ((better, 'tiny_t0_s10'), (worse, 'tiny_t0_s9')):
        for path in list(folder.rglob(f'tiny_t0_s{session}*')):
            shutil.move(path, str(path).replace(f'tiny_t0_s{session}', name))
    for path in list(folder.rglob('tiny_t0_s9*')):
        shutil.move(path, str(path).replace('tiny_t0_s9', 'tiny_t0_s1'))
    assert run_enjoy(folder / 'tiny_t0_s1_spec.json') == 0
    assert played['name'] == 'tiny_t0_s1'
    assert run_enjoy(folder) == 0
    assert played['name'] == 'tiny_t0_s10'


def test_it_plays_by_the_final_exploration(trained, monkeypatch):
    """0.1 of all actions at random, as at the end of the schedule, and not all of them, as at its start."""
    from slm_lab.agent.algorithm.base import Algorithm

    seen = set()
    act = Algorithm.act

    def spy(self, states, evaluating=False):
        policy, self.policy = (
            self.policy,
            lambda states, actor, explore_var, rng: (
                seen.add((explore_var, rng is self.eval_rng)),
                policy(states, actor, explore_var, rng),
            )[1],
        )
        try:
            return act(self, states, evaluating)
        finally:
            self.policy = policy

    monkeypatch.setattr(Algorithm, 'act', spy)
    assert run_enjoy(trained[0]['meta']['predir']) == 0
    assert seen == {(0.1, True)}


def test_a_spec_is_found_from_any_folder(trained, played, tmp_path, monkeypatch):
    """As run folders are: below the data folder, with or without `data/`."""
    name = Path(trained[0]['meta']['predir']).name
    shutil.copytree(trained[0]['meta']['predir'], tmp_path / 'data' / name)
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    for form in (name, f'data/{name}'):
        assert run_enjoy(f'{form}/tiny_t0_s1_spec.json') == 0
        assert played.pop('name') == 'tiny_t0_s1'


@pytest.mark.parametrize(
    ('what', 'wanted'),
    [
        ('{}/tiny_t0_s7_spec.json', "there is no file '{}/tiny_t0_s7_spec.json'"),
        ('/nowhere/at_all_t0_s0_spec.json', '/nowhere/at_all'),
        ('tiny_2020_01_01_000000', 'no run'),
    ],
)
def test_what_is_missing_is_named(what, wanted, trained, capsys):
    folder = trained[0]['meta']['predir']
    assert run_enjoy(what.format(folder)) == 2
    error = capsys.readouterr().err
    assert wanted.format(folder).removesuffix('/at_all') in error and len(error.splitlines()) == 1


@pytest.mark.parametrize('what', ['', '/tiny_t0_s1_spec.json'])
def test_the_run_of_another_spec_is_refused(what, trained, played, capsys):
    folder = trained[0]['meta']['predir']
    assert run_lab.main(['spec.json', 'tine', f'enjoy@{folder}{what}']) == 2
    assert not played
    assert capsys.readouterr().err.endswith("is a run of spec 'tiny', not of 'tine'\n")


def test_a_run_of_which_no_episode_had_ended_says_so(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(3))
    assert run_enjoy(spec['meta']['predir']) == 2
    assert 'no episode had ended when it last saved' in capsys.readouterr().err


def test_an_agent_without_nets_plays_too(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('Random', num_envs=3))
    run_to(spec, StopAt(150))
    before = hash_files(spec['meta']['predir'])
    assert run_enjoy(spec['meta']['predir']) == 0
    assert 'episodes, mean return' in capsys.readouterr().out
    assert hash_files(spec['meta']['predir']) == before


def make_classic(spec):
    """Leaves what SLM Lab v4.2 leaves: no checkpoints."""
    shutil.rmtree(Path(spec['meta']['predir']) / 'checkpoint')


def test_a_folder_of_nets_alone_is_played(tmp_path, played):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(250))
    best = best_of(spec)
    make_classic(spec)
    assert run_enjoy(spec['meta']['predir']) == 0
    assert first_difference(dict(best['nets']['net_model']), played['nets']['net']) is None


def test_nets_alone_without_the_statistics_that_they_need_are_refused(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN', normalize_state=True))
    run_to(spec, StopAt(250))
    make_classic(spec)
    assert run_enjoy(spec['meta']['predir']) == 2
    assert 'no observation statistics' in capsys.readouterr().err


def test_a_poisoned_best_net_runs_nothing(tmp_path, capsys):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(250))
    make_classic(spec)

    class Poison:
        def __reduce__(self):
            import os

            return os.mkdir, (str(tmp_path / 'poisoned'),)

    torch.save(Poison(), f'{spec["meta"]["model_prepath"]}_ckpt-best_net_model.pt')
    assert run_enjoy(spec['meta']['predir']) == 2
    assert 'was not read' in capsys.readouterr().err and not (tmp_path / 'poisoned').exists()


def test_a_signal_ends_it(trained, capsys):
    """Between two steps, with the status of the signal."""
    from slm_lab.experiment.stop import StopRequest

    class AfterTen(StopRequest):
        asked = 0

        def __call__(self):
            self.asked += 1
            self.signal = 2 if self.asked > 10 else None
            return self.asked > 10

    spec, _ = enjoy.find_session_spec(trained[0]['meta']['predir'], 'tiny')
    stop = AfterTen()
    assert len(enjoy.play(spec, stop)) <= 1
    assert stop.exit_status == 130
