"""What a search leaves on disk of its trials: all that it goes on from, and is analysed by, after however it ended.

Each trial has up to three records in `info/`:

    {name}_t{i}_sample.json      the values that it got, on disk before it starts
    {name}_t{i}_given_up.json    that the scheduler stops it, on disk before it is stopped
    {name}_t{i}_result.json      how it ended, and its metrics

A trial with a result is left alone; one without goes on from its checkpoints, or starts.
"""

import re
from pathlib import Path

from slm_lab.experiment.checkpoint import store_of
from slm_lab.lib import files
from slm_lab.spec import search_space, spec_util

FINISHED, GIVEN_UP, FAILED = 'finished', 'stopped by the scheduler', 'failed'
INTERRUPTED, MISSING = 'interrupted', 'not begun'
_SAMPLE = re.compile(r'(?P<name>.+)_t\d+_sample\.json')


def find_search(folder):
    """The spec of the search that a run folder holds, with its paths where the folder is now; None: it holds none."""
    matches = [_SAMPLE.fullmatch(path.name) for path in sorted((folder / 'info').glob('*_sample.json'))]
    name = next((match['name'] for match in matches if match), None)
    if name is None:
        return None
    spec = files.read_json(folder / f'{name}_spec.json')
    place = {'predir': str(folder), 'trial': -1, 'session': -1}
    return spec_util.set_paths({**spec, 'name': name, 'meta': {**spec['meta'], **place}})


class SearchRecords:
    """The records of a search's trials.

    Args:
        spec: the experiment's, with its paths set
    """

    def __init__(self, spec):
        self.spec, self.resolved = spec, spec_util.resolve(spec)
        self.total = search_space.count_trials(spec)

    def path(self, trial, what):
        return Path(f'{self.spec["meta"]["info_prepath"]}_t{trial}_{what}.json')

    def sample(self, trial):
        """The record of the values that a trial has got, or None."""
        return _read(self.path(trial, 'sample'))

    def result(self, trial):
        return _read(self.path(trial, 'result'))

    def write_sample(self, trial, values, concurrent):
        seed = self.spec['meta']['random_seed']
        record = {'trial': trial, 'values': values, 'random_seed': seed, 'concurrent': concurrent}
        files.write_json(record, self.path(trial, 'sample'), durable=True)

    def write_result(self, trial, result):
        files.write_json(result, self.path(trial, 'result'), durable=True)

    def write_given_up(self, trial, frame):
        path = self.path(trial, 'given_up')
        if not path.exists():
            files.write_json({'frame': frame}, path, durable=True)

    def trial_spec(self, trial, values):
        """The spec that a trial gets, ticked to it."""
        spec = search_space.apply(self.spec, values)
        if self.resolved['meta']['search_scheduler'] is not None:
            spec['meta']['max_session'] = 1
        spec['meta'].update(predir=str(Path(self.spec['meta']['prepath']).parent), trial=trial - 1)
        return spec_util.tick(spec, 'trial')

    def session_specs(self, trial):
        spec = self.trial_spec(trial, self.sample(trial)['values'])
        return [spec_util.session_spec(spec, i) for i in range(spec['meta'].get('max_session', 1))]

    def has_begun(self, trial):
        return Path(f'{self.spec["meta"]["prepath"]}_t{trial}_spec.json').is_file()

    def rows(self):
        """[what the table says of a trial] of all trials, as of `experiment_analysis.make_table`."""
        rows = []
        for trial in range(self.total):
            sample, result = self.sample(trial), self.result(trial)
            row = {'trial': trial, 'values': {}, 'metrics': {}, 'status': MISSING, 'frame': None, 'error': None}
            if sample is not None:
                row['status'] = INTERRUPTED if self.has_begun(trial) else MISSING
            row.update(result or {})
            if sample is not None:
                reached = reached_frame(self.session_specs(trial))
                row.update(values=sample['values'], frame=row['frame'] if reached is None else reached)
            rows.append(row)
        return rows

    def reports(self, trial):
        """[(frame, total_reward_ma)] of the rows that a scheduler was told of, as far as the trial has come."""
        path = Path(f'{self.spec["meta"]["info_prepath"]}_t{trial}_s0_session_df_train.csv')
        if not path.is_file():
            return []
        df = files.read_csv(path)
        df = df[(df['frame'] < self.resolved['env']['max_frame']) & df['total_reward_ma'].notna()]
        return [(int(frame), float(metric)) for frame, metric in zip(df['frame'], df['total_reward_ma'], strict=True)]


def reached_frame(session_specs):
    """The frame that all sessions of a trial have a checkpoint of, or None."""
    generations = [store_of(spec).find().generation for spec in session_specs]
    return None if None in generations else min(generation.frame for generation in generations)


def _read(path):
    return files.read_json(path) if path.is_file() else None
