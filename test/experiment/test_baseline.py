import json
import statistics

import gymnasium
import numpy as np
import pytest

from slm_lab.experiment import baseline

SHIPPED_IDS = ['CartPole-v0', 'CartPole-v1', 'Acrobot-v1', 'MountainCar-v0', 'MountainCarContinuous-v0', 'Pendulum-v1']


class CoinEnv(gymnasium.Env):
    """Four steps; the reward is the action. Counts its resets."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    num_resets = 0
    num_steps = 4

    def __init__(self, bonus=0):
        self.bonus = bonus
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        CoinEnv.num_resets += 1
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), float(self.bonus + action), False, self.t == self.num_steps, {}


class BrokenEnv(CoinEnv):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError('no simulator here')


class EndlessEnv(CoinEnv):
    num_steps = -1


@pytest.fixture(autouse=True)
def envs(monkeypatch):
    classes = {'LabCoin-v0': CoinEnv, 'LabBroken-v0': BrokenEnv, 'LabEndless-v0': EndlessEnv}
    for name, env_class in classes.items():
        gymnasium.register(name, entry_point=env_class)
    monkeypatch.setattr(baseline, '_known', {})
    monkeypatch.setattr(CoinEnv, 'num_resets', 0)
    yield
    for name in classes:
        del gymnasium.registry[name]


def env_spec(name, **keys):
    return {'name': name, 'max_frame': 1, **keys}


def expected_coin_returns(num_episodes):
    space, returns = gymnasium.spaces.Discrete(2), []
    for seed in range(num_episodes):
        space.seed(seed)
        returns.append(float(sum(space.sample() for _ in range(4))))
    return returns


def test_measures_whole_episodes_each_with_a_seed_of_its_own():
    returns = expected_coin_returns(10)
    assert baseline.measure(env_spec('LabCoin-v0'), num_episodes=10) == {
        'mean': pytest.approx(statistics.fmean(returns)),
        'std': pytest.approx(statistics.pstdev(returns)),
        'episodes': 10,
    }


def test_shipped_values_need_no_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, 'measure', None)
    table = json.loads(baseline.SHIPPED.read_text())
    assert set(SHIPPED_IDS) <= set(table)
    for name in SHIPPED_IDS:
        assert baseline.random_mean(env_spec(name), tmp_path) == table[name]['mean']
    assert not (tmp_path / 'info').exists()


def test_shipped_values_are_what_the_code_measures():
    shipped = json.loads(baseline.SHIPPED.read_text())['CartPole-v1']
    measured = baseline.measure(env_spec('CartPole-v1'))
    assert measured['mean'] == pytest.approx(shipped['mean'], rel=0.05)
    assert measured['std'] == pytest.approx(shipped['std'], rel=0.2)


def test_an_old_id_has_the_baseline_of_todays(tmp_path):
    old, current = (baseline.random_mean(env_spec(name), tmp_path) for name in ('Pendulum-v0', 'Pendulum-v1'))
    assert old == current


def test_keywords_and_time_limit_have_baselines_of_their_own(tmp_path):
    plain = baseline.random_mean(env_spec('LabCoin-v0'), tmp_path)
    assert baseline.random_mean(env_spec('LabCoin-v0', bonus=10), tmp_path) == pytest.approx(plain + 4 * 10)
    returns = baseline.random_mean(env_spec('LabCoin-v0', max_t=1), tmp_path)
    assert 0 < returns < 1 < plain  # one step instead of four
    cached = json.loads((tmp_path / 'info' / 'random_baseline.json').read_text())
    assert set(cached) == {'LabCoin-v0', 'LabCoin-v0 {"bonus":10}', 'LabCoin-v0 {"max_t":1}'}


def test_an_unknown_env_is_measured_once_per_run(tmp_path, monkeypatch):
    shipped_before = baseline.SHIPPED.read_bytes()
    mean = baseline.random_mean(env_spec('LabCoin-v0'), tmp_path)
    assert mean == pytest.approx(statistics.fmean(expected_coin_returns(100)))
    assert CoinEnv.num_resets == 100
    cached = json.loads((tmp_path / 'info' / 'random_baseline.json').read_text())
    assert cached['LabCoin-v0']['mean'] == mean and cached['LabCoin-v0']['episodes'] == 100
    monkeypatch.setattr(baseline, '_known', {})  # as in another process
    assert baseline.random_mean(env_spec('LabCoin-v0'), tmp_path) == mean
    assert CoinEnv.num_resets == 100
    assert baseline.SHIPPED.read_bytes() == shipped_before


@pytest.mark.parametrize('name', ['LabBroken-v0', 'LabEndless-v0', 'NoSuchEnv-v0'])
def test_an_env_that_cannot_be_measured_counts_as_0_with_one_warning(tmp_path, caplog, monkeypatch, name):
    monkeypatch.setattr(baseline, 'MAX_SECONDS', 0.05)
    assert baseline.random_mean(env_spec(name), tmp_path) == 0
    assert baseline.random_mean(env_spec(name), tmp_path) == 0
    (record,) = [record for record in caplog.records if record.levelname == 'WARNING']
    assert name in record.getMessage()


def test_the_command_updates_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baseline, 'SHIPPED', tmp_path / 'table.json')
    assert baseline.main(['LabCoin-v0']) == 0
    table = json.loads((tmp_path / 'table.json').read_text())
    assert table['LabCoin-v0']['mean'] == pytest.approx(statistics.fmean(expected_coin_returns(100)))
    assert capsys.readouterr().out.startswith('LabCoin-v0: mean ')
    assert baseline.main([]) == 2
    assert baseline.main(['LabBroken-v0']) == 2
    assert capsys.readouterr().err.splitlines()[-1] == 'error: no simulator here'
