"""What `train@` allows, refuses and reports, by the command line and on a real run folder."""

import itertools
import json
import re
import shutil

import pytest
from resume import hash_files, raw_spec, session_spec, uninterrupted, without_clock

import run_lab
from slm_lab.experiment import analysis
from slm_lab.experiment.session import Session
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trial import Trial
from slm_lab.lib import files, logger
from slm_lab.spec import spec_util

END = 303


pytestmark = pytest.mark.usefixtures('command')


class StopAfter(StopRequest):
    """Stops the session of a trial at a frame."""

    def __init__(self, frame):
        super().__init__()
        self.frame = frame

    def __call__(self):
        return self.session is not None and self.session.clock.frame >= self.frame

    session = None


class Run:
    """A spec file, and the run that it was trained to."""

    def __init__(self, folder, raw, stop_at=None):
        self.spec_file = folder / 'spec.json'
        self.raw = raw
        self.write(raw)
        self.stop_at(stop_at)

    def write(self, raw):
        files.write_json({'tiny': raw}, self.spec_file)

    def change(self, place, value):
        """Sets one key in the spec file; ABSENT removes it."""
        raw = json.loads(json.dumps(self.raw))
        part = raw
        *parents, key = place
        for name in parents:
            part = part[name]
        part.pop(key, None)
        part.update({} if value is ABSENT else {key: value})
        self.write(raw)

    def stop_at(self, frame):
        """Trains a new run up to a frame, or to its end."""
        spec = spec_util.get(str(self.spec_file), 'tiny')
        stop = StopRequest() if frame is None else StopAfter(frame)
        trial = Trial(spec, 'train', stop)
        self.folder = trial.folder
        build = Session.__init__

        def building(session, *args, **kwargs):
            build(session, *args, **kwargs)
            stop.session = session

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, '__init__', building)
            self.outcome = trial.run()
        assert self.outcome.finished == (frame is None)

    def train(self, prename=None, name='tiny', mode='train'):
        """Returns: exit status of `train@` the run."""
        return run_lab.main([str(self.spec_file), name, f'{mode}@{prename or self.folder}'])

    def csv(self, session=0):
        return self.folder / 'info' / f'tiny_t0_s{session}_session_df_train.csv'

    def history(self):
        return self.folder / 'info' / 'tiny_history.jsonl'

    def events(self):
        return [json.loads(line) for line in self.history().read_text().splitlines()]


ABSENT = 'left out'
AGENT, ALGORITHM, NET, MEMORY = ('agent', 0), ('agent', 0, 'algorithm'), ('agent', 0, 'net'), ('agent', 0, 'memory')
SCHEDULE = {'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.1, 'start_step': 20, 'end_step': 900}

# place in the spec file, new value, place in the table, what stands in the table
REFUSED = [
    ((*NET, 'optim_spec', 'lr'), 0.01, 'agent.net.optim_spec', '0.02', '0.01'),
    ((*NET, 'hid_layers'), [8, 8], 'agent.net.hid_layers', '[8]', '[8,8]'),
    ((*NET, 'type'), 'DuelingMLPNet', 'agent.net.type', '"MLPNet"', '"DuelingMLPNet"'),
    ((*NET, 'clip_grad_val'), None, 'agent.net.clip_grad_val', '0.5', 'null'),
    ((*NET, 'loss_spec'), {'name': 'SmoothL1Loss'}, 'agent.net.loss_spec', 'MSELoss', 'SmoothL1Loss'),
    ((*NET, 'lr_scheduler_spec', 'gamma'), 0.5, 'agent.net.lr_scheduler_spec', '0.9', '0.5'),
    ((*NET, 'update_frequency'), 20, 'agent.net.update_frequency', '12', '20'),
    ((*NET, 'polyak_coef'), 0.9, 'agent.net.polyak_coef', '0.3', '0.9'),
    ((*NET, 'update_type'), 'replace', 'agent.net.update_type', '"polyak"', '"replace"'),
    ((*ALGORITHM, 'name'), 'DoubleDQN', 'agent.algorithm.name', '"DQN"', '"DoubleDQN"'),
    ((*ALGORITHM, 'gamma'), 0.5, 'agent.algorithm.gamma', '0.9', '0.5'),
    ((*ALGORITHM, 'explore_var_spec'), SCHEDULE, 'agent.algorithm.explore_var_spec', '250', '900'),
    ((*ALGORITHM, 'training_frequency'), 3, 'agent.algorithm.training_frequency', '6', '3'),
    ((*ALGORITHM, 'training_start_step'), 9, 'agent.algorithm.training_start_step', '8', '9'),
    ((*MEMORY, 'max_size'), 100, 'agent.memory.max_size', '90', '100'),
    ((*MEMORY, 'batch_size'), 4, 'agent.memory.batch_size', '8', '4'),
    ((*MEMORY, 'use_cer'), True, 'agent.memory.use_cer', 'false', 'true'),
    (('env', 0, 'name'), 'Acrobot-v1', 'env.name', '"CartPole-v1"', '"Acrobot-v1"'),
    (('env', 0, 'num_envs'), 4, 'env.num_envs', '1', '4'),
    (('env', 0, 'max_t'), 31, 'env.max_t', '30', '31'),
    (('env', 0, 'normalize_state'), True, 'env.normalize_state', 'false', 'true'),
    (('env', 0, 'reward_scale'), 'sign', 'env.reward_scale', 'null', '"sign"'),
    (('env', 0, 'max_frame'), 149, 'env.max_frame', '303', '149'),  # less than what is trained
    (('meta', 'random_seed'), 8, 'meta.random_seed', '7', '8'),
    (('meta', 'rigorous_eval'), 2, 'meta.rigorous_eval', '0', '2'),
    ((*AGENT, 'load_net'), 'elsewhere', 'agent.load_net', 'null', '"elsewhere"'),
]
ALLOWED = [
    (('env', 0, 'max_frame'), 200, 'env.max_frame was 303, is 200'),  # less, but ahead
    (('env', 0, 'max_frame'), 310, 'env.max_frame was 303, is 310'),
    (('meta', 'log_frequency'), 20, 'meta.log_frequency was 61, is 20'),
    (('meta', 'eval_frequency'), 7, 'meta.eval_frequency was 50, is 7'),
    (('meta', 'num_cpus'), 2, 'meta.num_cpus was 1, is 2'),
    (('meta', 'num_gpus'), 0, 'meta.num_gpus was 1, is 0'),
    (('meta', 'max_trial'), 3, 'meta.max_trial was 1, is 3'),
    ((*AGENT, 'name'), 'another', 'agent.name was DQN, is another'),
    ((*NET, 'gpu'), 'auto', 'agent.net.gpu was False, is auto'),
    (('meta', 'random_seed'), ABSENT, 'The spec is as it was'),  # the recorded one is used
    (('search',), {'agent': [{'algorithm': {'gamma__grid_search': [0.5]}}]}, 'The spec is as it was'),
    (('env', 0, 'max_t'), 30.0, 'The spec is as it was'),  # the same number, written otherwise
]


@pytest.fixture(scope='module')
def stopped_run(tmp_path_factory):
    """A run that was stopped at frame 150; copied for each test."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp('stopped')
        patch.setattr(analysis, '_draw', lambda *args: True)
        patch.setenv('LAB_DATA_DIR', str(folder / 'data'))
        run = Run(folder, raw_spec('DQN'), stop_at=150)
        logger.close()
    return folder, run


@pytest.fixture
def stopped(stopped_run, tmp_path):
    folder, original = stopped_run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run = Run.__new__(Run)
    run.raw, run.spec_file = original.raw, tmp_path / 'spec.json'
    run.folder = tmp_path / 'data' / original.folder.name
    return run


@pytest.mark.parametrize(('place', 'value', 'key', 'was', 'now'), REFUSED, ids=lambda v: str(v)[:40])
def test_a_change_that_would_have_altered_the_past_is_refused(place, value, key, was, now, stopped, capsys):
    stopped.change(place, value)
    before = hash_files(stopped.folder.parent)
    assert stopped.train() == 2
    error = capsys.readouterr().err
    (row,) = [line for line in error.splitlines() if line.strip().startswith(key)]
    _, shown_was, shown_now = (cell.strip() for cell in row.split('|'))
    assert was in shown_was and now in shown_now and shown_was != shown_now
    assert 'restore the values' in error and 'load_net' in error
    assert hash_files(stopped.folder.parent) == before


def test_all_refused_changes_are_in_one_table(stopped, capsys):
    raw = json.loads(json.dumps(stopped.raw))
    raw['agent'][0]['algorithm']['gamma'] = 0.5
    raw['agent'][0]['net']['hid_layers'] = [9]
    raw['env'][0]['max_frame'] = 400  # allowed, so not in it
    stopped.write(raw)
    assert stopped.train() == 2
    error = capsys.readouterr().err
    assert 'agent.algorithm.gamma' in error and 'agent.net.hid_layers' in error and 'max_frame' not in error


@pytest.mark.parametrize(('place', 'value', 'line'), ALLOWED, ids=lambda v: str(v)[:40])
def test_a_change_that_leaves_the_past_as_it_was_is_taken_over(place, value, line, stopped, capsys):
    stopped.change(place, value)
    rows = stopped.csv().read_bytes()
    assert stopped.train() == 0
    out = capsys.readouterr().out
    assert line in out and 'Resumed trial 0 session 0 from the checkpoint of frame 150' in out
    assert stopped.csv().read_bytes().startswith(rows)  # what was there stays, byte by byte
    (event,) = [event for event in stopped.events() if event['event'] == 'resume']
    assert [place for place, _, _ in event['changes']] == ([] if 'as it was' in line else [line.split(' was ')[0]])


def test_a_new_log_frequency_holds_from_here_on(stopped):
    stopped.change(('meta', 'log_frequency'), 50)
    assert stopped.train() == 0
    assert list(files.read_csv(stopped.csv())['frame']) == [0, 61, 122, 150, 200, 250, 300, 303]


def test_a_resumed_run_is_the_uninterrupted_one(stopped, tmp_path):
    """Through the command line: the same rows, of which the first ones are untouched."""
    before = stopped.csv().read_bytes()
    assert stopped.train() == 0
    whole = uninterrupted(session_spec(tmp_path / 'whole', stopped.raw))
    written = files.read_csv(stopped.csv())
    assert without_clock(written).equals(without_clock(whole['train_df']))
    assert stopped.csv().read_bytes().startswith(before)
    assert list(written['frame']) == [0, 61, 122, 183, 244, 303]
    assert list(written['explore_var']) == sorted(written['explore_var'], reverse=True)


def test_the_report_says_what_it_goes_on_from(stopped, capsys):
    stopped.train()
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if 'Resumed trial 0 session 0 from the checkpoint of frame' in line)
    report = lines[start : start + 6]
    assert report[1].startswith('  frame 150 of 303   epi ') and '   opt_step 46' in report[1]
    # epsilon from 1 at frame 20 to 0.1 at 250; lr 0.02 less a tenth at 40, 80 and 120; the memory holds 90 of 150
    epsilon, lr = 1 - 0.9 * (150 - 20) / 230, 0.02 * 0.9**3
    assert report[2].startswith(f'  explore_var {epsilon:g}   lr {lr:g}   memory 90 (of 150 seen)   best return ')
    restored = set(report[3].removeprefix('  restored: ').split(', '))
    parts = {'nets', 'optimizers', 'data frames', 'clock', 'random generators', 'memory', 'env', 'best'}
    assert restored == parts
    assert report[4].startswith('  rebuilt from the spec: ')
    assert report[5] == '  missing: nothing'


def test_the_report_names_what_is_lost(stopped, capsys):
    """Without its segments the memory starts empty, and training waits until it is warm again."""
    for path in stopped.folder.glob('checkpoint/*/*.seg'):
        path.unlink()
    assert stopped.train() == 0
    out = capsys.readouterr().out
    assert 'memory 0 (of 0 seen)' in out and 'missing: agent.memory.ring (damaged' in out
    restored = next(line for line in out.splitlines() if line.startswith('  restored: '))
    assert 'memory' not in restored and 'nets' in restored
    df = files.read_csv(stopped.csv())
    assert df['opt_step'].is_monotonic_increasing and df['opt_step'].iloc[-1] > 46


def test_the_copy_is_used_when_the_spec_file_is_gone(stopped, capsys):
    stopped.spec_file.unlink()
    assert stopped.train() == 0
    out = capsys.readouterr().out
    assert 'spec.json is gone; the copy in' in out and 'The spec is as it was' in out


def test_another_specs_run_is_refused_by_name(stopped, capsys):
    files.write_json({'tiny': stopped.raw, 'other': stopped.raw}, stopped.spec_file)
    before = hash_files(stopped.folder.parent)
    assert stopped.train(name='other') == 2
    assert "is a run of spec 'tiny', not of 'other'" in capsys.readouterr().err
    assert stopped.train(name='othr') == 2
    assert stopped.train(prename='latest', name='other') == 2
    assert "no run of spec 'other'" in capsys.readouterr().err
    assert hash_files(stopped.folder.parent) == before


def test_a_spec_file_without_the_spec_is_an_error_and_no_reason_to_take_the_copy(stopped, capsys):
    files.write_json({'tine': stopped.raw}, stopped.spec_file)
    assert stopped.train() == 2
    assert "spec 'tiny' is unknown; did you mean 'tine'?" in capsys.readouterr().err


@pytest.mark.parametrize('form', ['absolute', 'slash', 'name', 'data', 'latest'])
def test_a_run_is_found_in_every_form(form, stopped, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path / 'data')
    name = stopped.folder.name
    forms = {'absolute': stopped.folder, 'slash': f'{stopped.folder}/', 'name': name, 'data': f'data/{name}'}
    assert stopped.train(prename=forms.get(form, form)) == 0
    assert 'from the checkpoint of frame 150' in capsys.readouterr().out
    assert [p.name for p in (tmp_path / 'data').iterdir()] == [name]  # no new folder


def test_a_folder_that_is_no_run_is_refused(stopped, tmp_path, capsys):
    (tmp_path / 'data' / 'empty').mkdir()
    assert stopped.train(prename=tmp_path / 'data' / 'empty') == 2
    assert 'holds no spec' in capsys.readouterr().err
    assert stopped.train(prename='tiny_2020_01_01_000000') == 2
    assert stopped.folder.name in capsys.readouterr().err  # the nearest


def test_a_checkpoint_of_another_spec_than_the_folders_is_refused(stopped, capsys):
    """Somebody has edited the copy in the run folder as well: the checkpoint itself knows better."""
    for path in [stopped.spec_file, *stopped.folder.glob('*_spec.json')]:
        path.write_text(path.read_text().replace('"gamma": 0.9,', '"gamma": 0.91,', 1))
    before = hash_files(stopped.folder / 'checkpoint') | hash_files(stopped.folder / 'model')
    assert stopped.train() == 2
    assert re.search(r'agent\.algorithm\.gamma +\| 0\.9 +\| 0\.91', capsys.readouterr().err)
    assert hash_files(stopped.folder / 'checkpoint') | hash_files(stopped.folder / 'model') == before


def test_a_run_whose_checkpoints_and_nets_are_all_damaged_never_starts_anew(stopped, capsys):
    for path in [*stopped.folder.glob('checkpoint/*/*_state.pt')]:
        path.write_bytes(path.read_bytes()[:100])
    for path in stopped.folder.glob('model/*'):
        path.unlink()
    rows = stopped.csv().read_bytes()
    assert stopped.train() == 2
    assert stopped.csv().read_bytes() == rows
    assert 'new run' in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_in_a_line(stopped, capsys):
    newest = sorted(stopped.folder.glob('checkpoint/*/*_state.pt'))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert stopped.train() == 0
    out = capsys.readouterr().out
    assert newest.name in out and 'from the checkpoint of frame 122' in out


# --- finished runs, and more or fewer sessions


@pytest.fixture
def finished(tmp_path):
    return Run(tmp_path, raw_spec('DQN', env={'max_frame': 130}))


def test_a_finished_run_says_so_and_is_analysed_again(finished, capsys):
    scalar = finished.folder / 'info' / 'tiny_t0_trial_metrics_scalar.json'
    figures = scalar.read_bytes()
    scalar.unlink()
    kept = [hash_files(finished.folder / name) for name in ('checkpoint', 'model')], finished.csv().read_bytes()
    assert finished.train() == 0
    out = capsys.readouterr().out
    assert '1 of 1 sessions have nothing left to train' in out and 'Extend it with: ' in out
    assert 'Running RL loop' not in out
    assert scalar.read_bytes() == figures
    assert kept == (
        [hash_files(finished.folder / name) for name in ('checkpoint', 'model')],
        finished.csv().read_bytes(),
    )


def test_a_finished_run_is_extended_by_a_larger_max_frame(finished, tmp_path, capsys):
    assert list(files.read_csv(finished.csv())['frame']) == [0, 61, 122, 130]
    finished.change(('env', 0, 'max_frame'), END)
    assert finished.train() == 0
    assert 'env.max_frame was 130, is 303' in capsys.readouterr().out
    whole = uninterrupted(session_spec(tmp_path / 'whole', raw_spec('DQN')))
    assert without_clock(files.read_csv(finished.csv())).equals(without_clock(whole['train_df']))


def test_more_sessions_start_at_0_and_fewer_are_refused(finished, capsys):
    first = hash_files(finished.folder / 'checkpoint'), finished.csv().read_bytes()
    finished.change(('meta', 'max_session'), 2)
    assert finished.train() == 0
    out = capsys.readouterr().out
    assert '1 of 2 sessions have nothing left to train' in out
    assert 'Session 1 has nothing to go on from and starts at frame 0' in out
    assert first[1] == finished.csv().read_bytes()
    assert first[0].items() <= hash_files(finished.folder / 'checkpoint').items()
    rows, others = (without_clock(files.read_csv(finished.csv(session))) for session in (0, 1))
    assert list(rows['frame']) == list(others['frame']) and not rows.equals(others)  # a seed of its own
    finished.change(('meta', 'max_session'), 1)
    before = hash_files(finished.folder)
    assert finished.train() == 2
    assert 'meta.max_session | 2' in capsys.readouterr().err
    assert hash_files(finished.folder) == before


# --- provenance


def test_the_history_is_only_ever_appended(stopped):
    histories = [stopped.history().read_text()]
    for _ in range(2):
        assert stopped.train() == 0
        histories.append(stopped.history().read_text())
    for earlier, later in itertools.pairwise(histories):
        assert later.startswith(earlier) and later != earlier
    events = stopped.events()
    names = [event['event'] for event in events]
    assert names[:2] == ['start', 'stop'] and names.count('resume') == 2 and names[-1] == 'finish'
    assert {event['random_seed'] for event in events if 'random_seed' in event} == {7}
    for event in events:
        assert {'time', 'host', 'pid', 'git_sha', 'versions'} <= set(event)


def test_a_drawn_seed_is_recorded_and_kept(tmp_path):
    """Without a seed in the spec one is drawn; the resumed run has it, and never another."""
    raw = raw_spec('DQN', env={'max_frame': 130})
    del raw['meta']['random_seed']
    run = Run(tmp_path, raw)
    seeds = {event['random_seed'] for event in run.events()}
    run.change(('env', 0, 'max_frame'), END)
    assert run.train() == 0
    assert seeds == {event['random_seed'] for event in run.events() if 'random_seed' in event}
    (seed,) = seeds
    raw = raw_spec('DQN', meta={'random_seed': seed})
    whole = uninterrupted(session_spec(tmp_path / 'whole', raw))
    assert without_clock(files.read_csv(run.csv())).equals(without_clock(whole['train_df']))


def test_a_dev_run_resumes_as_one(tmp_path, capsys):
    """With gradient norms, which only dev mode measures, on both sides of the seam."""
    raw = raw_spec('DQN', meta={'max_session': 2})
    run = Run.__new__(Run)
    run.raw, run.spec_file = raw, tmp_path / 'spec.json'
    run.write(raw)
    run_lab_status = run_lab.main([str(run.spec_file), 'tiny', 'dev'])
    assert run_lab_status == 0
    run.folder = next((tmp_path / 'data').iterdir())
    run.change(('env', 0, 'max_frame'), 400)
    assert run.train(mode='dev') == 0
    assert 'from the checkpoint of frame 303' in capsys.readouterr().out
    df = files.read_csv(run.csv())
    assert list(df['frame']) == [0, 61, 122, 183, 244, 305, 366, 400]
    assert df['grad_norm'].iloc[1:].notna().all()


def test_a_renamed_folder_is_still_the_run_that_it_was(stopped, tmp_path, capsys):
    renamed = stopped.folder.with_name('my_best_one')
    stopped.folder.rename(renamed)
    assert stopped.train(prename=renamed) == 0
    assert 'from the checkpoint of frame 150' in capsys.readouterr().out
    assert [p.name for p in (tmp_path / 'data').iterdir()] == ['my_best_one']


def test_a_damaged_copy_of_the_spec_gives_way_to_the_next(stopped, capsys):
    (stopped.folder / 'tiny_spec.json').write_text('{"agent": [')
    assert stopped.train() == 0
    out = capsys.readouterr().out
    assert 'tiny_spec.json cannot be read' in out and 'from the checkpoint of frame 150' in out


def test_a_key_that_a_later_lab_adds_with_a_default_is_no_change(stopped, capsys, monkeypatch):
    """The checkpoint keeps the spec as it was written: what the lab has learnt since is filled in on both sides."""
    from slm_lab.agent.net.mlp import MLPNet
    from slm_lab.lib.keys import Key

    monkeypatch.setattr(MLPNet, 'KEYS', {**MLPNet.KEYS, 'a_new_key': Key('bool', False)})
    assert stopped.train() == 0
    assert 'The spec is as it was' in capsys.readouterr().out
