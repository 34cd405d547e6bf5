"""Ray Tune runs the trials of a search: side by side, as many as there are CPUs and GPUs for.

What is to be run, and what came of it, is the experiment's business: it hands over a queue. Ray is imported, and
started, only here; nothing of it stays on disk.
"""

import contextlib
import importlib
import logging
import os
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from slm_lab.experiment import search_worker
from slm_lab.experiment.run_lock import RunLock
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.errors import LabError, MachineError
from slm_lab.lib.machine import count_cpus

HOW_TO_INSTALL = "pip install '.[ray]'"
_METRIC, _TIME = 'total_reward_ma', 'frame'
_SCRATCH = 'slm_lab_ray_'
_YOUNG = 60  # seconds
_LONGEST_SCRATCH = 40  # characters: below it Ray makes sockets, whose paths may have 107

# Ray tells its makers nothing, shows no output of its own, and leaves signals to the lab.
_ENVIRONMENT = {
    'RAY_USAGE_STATS_ENABLED': '0',
    'RAY_DISABLE_IMPORT_WARNING': '1',
    'RAY_DEDUP_LOGS': '0',
    'RAY_AIR_NEW_OUTPUT': '0',
    'RAY_TRAIN_V2_ENABLED': '0',
    'RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO': '0',
    'RAY_CHDIR_TO_TRIAL_DIR': '0',
    'RAY_TUNE_DISABLE_AUTO_CALLBACK_LOGGERS': '1',
    'TUNE_DISABLE_AUTO_CALLBACK_LOGGERS': '1',
    'TUNE_DISABLE_AUTO_CALLBACK_SYNCER': '1',
    'TUNE_DISABLE_SIGINT_HANDLER': '1',
    'TUNE_DISABLE_STRICT_METRIC_CHECKING': '1',
    'TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S': '0',
    'TUNE_GLOBAL_CHECKPOINT_S': str(10**9),
}


@dataclass(frozen=True)
class Job:
    """A trial for Ray to run.

    Args:
        trial: its index
        details: what `search_worker.TrialProcess` takes, but for 'reports'
        cpu, gpu: what it takes of the machine
    """

    trial: int
    details: dict
    cpu: float
    gpu: float


def joins_cluster():
    """Whether trials run on a cluster that is there already."""
    return bool(os.environ.get('RAY_ADDRESS'))


def require_ray(who='search', module='ray.tune'):
    """Raises: LabError that says how to install it, where it is not."""
    os.environ.update(_ENVIRONMENT)
    try:
        importlib.import_module(module)
    except ImportError as e:
        if (e.name or '').partition('.')[0] not in ('ray', 'pyarrow'):
            raise
        raise LabError(f'{who} needs Ray: {HOW_TO_INSTALL}') from None


def require_optuna():
    try:
        import optuna
    except ImportError:
        raise LabError(f'search_alg optuna needs Optuna: {HOW_TO_INSTALL}') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def run(queue, num_trials, stop, asha=None, seed=0):
    """Runs all that a queue yields, until it is empty or `stop()`.

    Args:
        queue: `next()` -> Job, or None when there is none yet, or StopIteration; `ended(trial, died)` with a line on
            how a process died without a result, or None; `give_up(trial, frame)`; `reports(trial)` -> [(frame, metric)]
            of what it has told of before; `others()` -> [index] of the trials that have ended earlier
        num_trials: that the queue can yield at most
        stop: StopRequest
        asha: keyword arguments of ASHA (grace_period, reduction_factor, brackets, max_t), or None
        seed: of ASHA's choice of brackets
    """
    require_ray()
    with running_ray(stop) as scratch, warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of Ray about itself
        from ray import tune

        try:
            tune.run(
                tune.with_resources(search_worker.trainable_class(), _resources),
                name='search',
                storage_path=str(scratch / 'tune'),
                search_alg=_make_searcher(queue, stop, reports=asha is not None),
                scheduler=None if asha is None else _make_asha(queue, asha, seed),
                stop=_make_stopper(stop),
                num_samples=num_trials,
                reuse_actors=True,
                raise_on_failed_trial=False,
                verbose=0,
                log_to_file=False,
            )
        finally:
            stop.install()


def _resources(config):
    from ray import tune

    return tune.PlacementGroupFactory([{'CPU': config['cpu'], 'GPU': config['gpu']}])


# --- Ray's own parts


@contextlib.contextmanager
def running_ray(stop):
    """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names. Yields: a folder for its files."""
    import ray

    scratch, lock = _make_scratch()
    options = {'logging_level': logging.ERROR, 'log_to_driver': False}
    path_before, path = os.environ.get('PYTHONPATH'), search_worker.python_path()
    if joins_cluster():
        options['runtime_env'] = {'env_vars': {'PYTHONPATH': path}}
    else:
        os.environ['PYTHONPATH'] = path
        options.update(
            num_cpus=count_cpus(),
            include_dashboard=False,
            _temp_dir=str(scratch),
            # trials save when their worker goes, and end by themselves
            _system_config={'kill_child_processes_on_worker_exit': False},
        )
    try:
        try:
            ray.init(**options)
        except Exception as e:
            lines = str(e).strip().splitlines() or [type(e).__name__]
            raise MachineError(f'Ray cannot be started: {lines[0]}') from e
        _log_to_file()
        stop.install()  # Ray takes SIGTERM
        yield scratch
    finally:
        ray.shutdown()
        lock.__exit__()
        shutil.rmtree(scratch, ignore_errors=True)
        os.environ.pop('PYTHONPATH', None)
        os.environ.update({} if path_before is None else {'PYTHONPATH': path_before})


def _log_to_file():
    """Ray's errors, e.g. why a worker died, go to the log file of the search."""
    ray_logger = logging.getLogger('ray')
    ray_logger.setLevel(logging.ERROR)
    handlers = [h for h in logging.getLogger('slm_lab').handlers if isinstance(h, logging.FileHandler)]
    ray_logger.handlers, ray_logger.propagate = handlers or [logging.NullHandler()], False


def _make_scratch():
    """A folder that goes with this process, and the lock that it holds on it. Those of killed processes go now."""
    folder = tempfile.gettempdir()
    if len(folder) > _LONGEST_SCRATCH:
        folder = '/tmp'
    for path in Path(folder).glob(f'{_SCRATCH}*'):
        with contextlib.suppress(LabError, OSError):
            if time.time() - path.stat().st_mtime < _YOUNG:  # its maker may be about to lock it
                continue
            with RunLock(path):
                shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    return scratch, RunLock(scratch).__enter__()


class _Unsaved:
    """Ray keeps copies of its parts on disk; the search keeps all that matters in its run folder."""

    def __reduce__(self):
        return dict, ()

    def save_to_dir(self, *args, **kwargs):
        pass

    def save(self, *args, **kwargs):
        pass


def _make_searcher(queue, stop, reports):
    from ray.tune.search import Searcher

    class QueueSearcher(_Unsaved, Searcher):
        """Hands the jobs of the queue to Tune, and Tune's news to the queue."""

        def __init__(self):
            super().__init__()
            self.trials = {}  # Ray's id -> trial index

        def suggest(self, trial_id):
            if stop():
                return Searcher.FINISHED
            try:
                job = queue.next()
            except StopIteration:
                return Searcher.FINISHED
            if job is None:
                return None
            self.trials[trial_id] = job.trial
            return {'trial': job.trial, 'job': {**job.details, 'reports': reports}, 'cpu': job.cpu, 'gpu': job.gpu}

        def on_trial_complete(self, trial_id, result=None, error=False):
            if trial_id in self.trials:
                died = "its Ray worker died; the search's log says why" if error else (result or {}).get('died')
                queue.ended(self.trials.pop(trial_id), died)

    return QueueSearcher()


def _make_stopper(stop):
    from ray.tune import Stopper

    class SignalStopper(_Unsaved, Stopper):
        """Ends all trials, each with a checkpoint, when the search is asked to stop."""

        is_installed = False

        def __call__(self, trial_id, result):
            return False

        def stop_all(self):
            if not self.is_installed:  # Tune takes SIGUSR1 when it starts
                stop.install()
                self.is_installed = True
            return stop()

    return SignalStopper()


@dataclass
class _EarlierTrial:
    """A trial that is over, as far as ASHA needs one."""

    trial_id: str
    config: dict


def _make_asha(queue, options, seed):
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    class ResumableASHA(_Unsaved, ASHAScheduler):
        """ASHA that has seen what trials told of before this process: its rungs are those of a search never stopped."""

        def __init__(self):
            super().__init__(time_attr=_TIME, metric=_METRIC, mode='max', **options)
            for index in queue.others():
                self._replay(_EarlierTrial(f'earlier_{index}', {'trial': index}))

        def on_trial_add(self, tune_controller, trial):
            decision, frame = self._replay(trial)
            if decision == TrialScheduler.STOP:  # of the last row: it went on after those before
                queue.give_up(trial.config['trial'], frame)

        def on_trial_result(self, tune_controller, trial, result):
            if super().on_trial_result(tune_controller, trial, result) == TrialScheduler.STOP:
                queue.give_up(trial.config['trial'], result[_TIME])
            return TrialScheduler.CONTINUE  # it reads the verdict when it is told to go on, and ends by itself

        def _replay(self, trial):
            """Returns: (decision on its last row, frame of that row); both None where there is none."""
            index, decision, frame = trial.config['trial'], None, None
            with rng_lib.GlobalStreams(rng_lib.derive_seed(seed, 'search', 'bracket', index)):
                super().on_trial_add(None, trial)
            for frame, metric in queue.reports(index):
                decision = super().on_trial_result(None, trial, {_TIME: frame, _METRIC: metric})
            return decision, frame

    return ResumableASHA()


# --- Optuna


def suggest_by_optuna(spaces, seed, trial, told):
    """Values of a trial by Optuna's TPE: a pure function of the arguments.

    Args:
        spaces: {place: Space}
        seed: the experiment's
        told: [(values, result or None for a failure)] of earlier trials
    Returns: {place: value}
    """
    optuna = require_optuna()
    distributions = {place: _distribution(optuna, space) for place, space in spaces.items()}
    sampler = optuna.samplers.TPESampler(seed=rng_lib.derive_seed(seed, 'search', 'optuna', trial) % 2**32)
    study = optuna.create_study(direction='maximize', sampler=sampler)
    for values, result in told:
        params = {place: _to_optuna(spaces[place], value) for place, value in values.items()}
        state = optuna.trial.TrialState.FAIL if result is None else optuna.trial.TrialState.COMPLETE
        frozen = optuna.trial.create_trial(params=params, distributions=distributions, value=result, state=state)
        study.add_trial(frozen)
    params = study.ask(distributions).params
    return {place: _from_optuna(space, params[place]) for place, space in spaces.items()}


def check_for_optuna(name, spaces):
    """Raises: LabError for a kind of space that Optuna does not have."""
    for place, space in spaces.items():
        if space.kind == 'grid_search' or space.how.normal:
            instead = 'choice' if space.kind == 'grid_search' else 'uniform'
            raise LabError(
                f'{name} > search.{place}__{space.kind}: search_alg optuna does not know this kind of space; use '
                f'{instead}, or search_alg random'
            )


def _distribution(optuna, space):
    how, args = space.how, space.args
    if not how.args:  # values may be lists, which Optuna does not take: it gets their indices
        return optuna.distributions.CategoricalDistribution(range(len(args)))
    if how.log and how.quantum:  # it has no multiples in the logarithm: they are made of what it finds
        return optuna.distributions.FloatDistribution(float(args[0]), float(args[1]), log=True)
    low, high, step = args[0], args[1], {}
    if how.quantum:
        low, high, step = space.quantize(low), space.quantize(high), {'step': args[2]}
    if how.whole:
        return optuna.distributions.IntDistribution(low, high - (not how.quantum), log=how.log, **step)
    return optuna.distributions.FloatDistribution(float(low), float(high), log=how.log, **step)


def _to_optuna(space, value):
    return value if space.how.args else space.args.index(value)


def _from_optuna(space, param):
    return space.quantize(param) if space.how.args else space.args[param]
