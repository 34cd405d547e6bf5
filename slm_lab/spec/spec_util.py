"""Specs from file to run: get, check, override for a mode, tick through trials and sessions, save.

A spec is one JSON object `{agent: [{…}], env: [{…}], meta: {…}}` (optional `body`, `search`, `spec_params`). The spec
of a user is kept as it was written; `meta` gains what the run adds: indices, paths, seed, provenance.
"""

import copy
import logging
import math
import os
import re
import subprocess
import time
from pathlib import Path

from slm_lab.lib import files, paths
from slm_lab.lib.errors import LabError, SpecError, suggest
from slm_lab.lib.keys import Key, leftover, read_keys
from slm_lab.lib.registry import ALGORITHMS, ENV_TABLES
from slm_lab.lib.schedule import check_learning_rate
from slm_lab.spec import templates

logger = logging.getLogger('slm_lab.spec')

TOP_KEYS = ('agent', 'env', 'body', 'meta', 'name', 'search', 'spec_params')

AGENT_KEYS = {
    'name': Key('str', '', note='a label'),
    'algorithm': Key('dict'),
    'memory': Key('dict'),
    'net': Key('dict', {}),
    'critic_net': Key('dict|null', None, note="CrossQ's critics; null: as the net"),
    'load_net': Key('str|null', None, note='run folder, model prepath or .pt file to start from trained nets'),
}

SCHEDULER_KEYS = {
    'grace_period': Key('int|null', None, low=1, note='frames that no trial is stopped before; null: log_frequency'),
    'reduction_factor': Key('number', 4, above=1, note='one in so many goes on at each rung'),
    'brackets': Key('int', 1, low=1, note='brackets, each with its first rung later'),
    'max_t': Key('int|null', None, low=1, note='frames at which a trial is stopped; null: max_frame'),
}

RESOURCE_KEYS = {
    'cpu': Key('number', 1, above=0, note='CPUs of a trial'),
    'gpu': Key('number', 0, low=0, note='GPUs of a trial'),
}


def _filled_by(table):
    return lambda value, where: read_keys(table, value, where).values


META_KEYS = {
    'distributed': Key('bool|str', False, choices=(False, 'shared', 'synced'), note='Hogwild: sessions train one net'),
    'log_frequency': Key('int', 10000, low=1, note='frames between rows and checkpoints'),
    'eval_frequency': Key('int', 10000, low=1, note='frames between evaluations'),
    'rigorous_eval': Key('int|bool|null', 0, low=0, note='0, or the number of evaluation envs'),
    'max_session': Key('int', 1, low=1, note='sessions of a trial'),
    'max_trial': Key('int|null', 1, low=1, note='trials of a search'),
    'num_cpus': Key('number', 1, above=0, note='CPUs that a session takes'),
    'num_gpus': Key('number', 1, low=0, note='GPUs that a session takes'),
    'ray': Key('bool', False, note='sessions are Ray tasks: on the cluster of RAY_ADDRESS, or on this machine'),
    'max_restarts': Key('int', 3, low=0, note='times that a session goes on elsewhere when its node dies'),
    'random_seed': Key('int|null', None, low=0, note='null: one is drawn and recorded'),
    'torch_num_threads': Key('int', 1, low=1, note='torch threads of a session'),
    'search_alg': Key('str', 'random', choices=('random', 'optuna'), note='how a search finds values'),
    'search_scheduler': Key(
        'dict|null', None, fill=_filled_by(SCHEDULER_KEYS), note='ASHA: stops trials of a search that do badly'
    ),
    'search_resources': Key(
        'dict|null', None, fill=_filled_by(RESOURCE_KEYS), note='of a trial of a search; null: num_cpus, num_gpus'
    ),
    'search': leftover(),
    'train_mode': leftover(),
}

# written by the lab, so found in specs that a run folder holds
RUN_KEYS = (
    'experiment',
    'trial',
    'session',
    'cuda_offset',
    'resume',
    'experiment_ts',
    'prepath',
    'predir',
    'graph_prepath',
    'info_prepath',
    'log_prepath',
    'model_prepath',
    'git_sha',
)

# names of old specs that no release since v4.2 could run
REMOVED = {'HydraDQN': "'HydraDQN' (one net for several envs) is not supported; train DQN in each env on its own"}

FOLDERS = ('graph', 'info', 'log', 'model')

_NAME = re.compile(rf'\w[ (),{templates.IN_A_NAME}]*')
_NAME_BYTES = 160  # of the 255 of a file name; the longest ends, of graphs that are being written, take some 80


def find_file(spec_file):
    """The file as given, else under `slm_lab/spec/` (with or without that prefix)."""
    inside = str(spec_file).replace('slm_lab/spec/', '', 1)
    for path in (Path(spec_file), paths.SPEC_DIR / inside):
        if path.is_file():
            return path.absolute()
    known = [str(p.relative_to(paths.SPEC_DIR)) for p in paths.SPEC_DIR.rglob('*.json') if not p.name.startswith('_')]
    raise SpecError(f"spec file '{spec_file}' is neither here nor under slm_lab/spec/{suggest(inside, known)}")


def get(spec_file, spec_name, experiment_ts=None):
    """Reads one spec of a file, adds what a run needs to its meta, and checks it.

    Args:
        spec_name: as in the file, or as a template of the file makes it (`templates`)
        experiment_ts: the timestamp of the run that is resumed; None starts a new one.
    Raises: SpecError
    """
    spec = templates.pick(_read_specs(spec_file), spec_name, spec_file)
    if not isinstance(spec, dict):
        raise SpecError(f'{spec_name}: {spec!r} is not of the type wanted here: dict')
    spec['name'] = spec_name
    return prepare(spec, experiment_ts)


def _read_specs(spec_file):
    """{name: spec} of a file, as they stand there; empty for a file of anything else."""
    path = find_file(spec_file)
    try:
        specs = files.read_json(path)
    except LabError as e:
        raise SpecError(str(e)) from None
    return specs if isinstance(specs, dict) else {}


def template_names(spec_file, spec_name):
    """The names of the specs that a template stands for; none where the name is another spec's, or the file is gone.

    Raises: SpecError for a file that cannot be read, or a template that is wrong.
    """
    try:
        find_file(spec_file)
    except SpecError:
        return []
    spec = _read_specs(spec_file).get(spec_name)
    return templates.names(spec_name, spec) if templates.is_template(spec) else []


def get_all(spec_file, spec_name, experiment_ts=None):
    """The specs of a template, each as `get` returns it, spread over the GPUs. Raises: SpecError"""
    expanded = templates.pick_all(_read_specs(spec_file), spec_name, spec_file)
    specs = [prepare({**spec, 'name': name}, experiment_ts) for name, spec in expanded.items()]
    for i, spec in enumerate(specs):
        spec['meta']['cuda_offset'] += i * int(spec['meta'].get('max_session', 1))
    return specs


def prepare(spec, experiment_ts=None):
    """Brings a spec into the form that runs: agent and env as lists, meta extended; then checks it."""
    for part in ('agent', 'env'):
        if isinstance(spec.get(part), dict):
            spec[part] = [spec[part]]
    if isinstance(spec.get('meta'), dict):
        spec['meta'] = {
            **spec['meta'],
            'experiment': -1,
            'trial': -1,
            'session': -1,
            'cuda_offset': _cuda_offset(),
            'resume': experiment_ts is not None,
            'experiment_ts': experiment_ts or time.strftime('%Y_%m_%d_%H%M%S'),
            'prepath': None,
            'predir': None,
            'git_sha': git_sha(),
        }
    check(spec)
    return spec


def _cuda_offset():
    text = os.environ.get('CUDA_OFFSET') or '0'
    if not text.isdigit():
        raise SpecError(f"CUDA_OFFSET: '{text}' is not a whole number")
    return int(text)


def git_sha():
    """The checkout's commit, or 'unknown' outside of one: provenance only, nothing depends on it."""
    try:
        out = subprocess.run(
            ['git', 'rev-parse', 'HEAD'], cwd=paths.PACKAGE_DIR, capture_output=True, text=True, timeout=5, check=True
        )
        return out.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return 'unknown'


def check(spec):
    """Checks every key of a spec against the tables of the classes it names, before anything is built.

    Raises: SpecError with the place (`dqn_cartpole > agent.0.net.hid_layers`), what came and what is allowed.
    Logs one line that lists the keys which old specs carry and nothing reads.
    """
    _, ignored = _resolve(spec)
    if ignored:
        logger.warning('%s: nothing reads %s', spec['name'], ', '.join(place.split(' > ')[-1] for place in ignored))
    return True


def check_name(name):
    """Raises: SpecError for a name that the folder and the files of a run cannot bear."""
    if not _NAME.fullmatch(str(name)):
        raise SpecError(
            f'{name!r} is no name for a spec, since folders and files are named after it: use letters, digits, spaces '
            'and _ . + = - ( ) and commas, the first one a letter, a digit or _'
        )
    length = len(os.fsencode(str(name)))
    if length > _NAME_BYTES:
        raise SpecError(
            f"'{name}' is too long a name for a spec, since folders and files are named after it: {length} bytes; use "
            f'up to {_NAME_BYTES}'
        )


def resolve(spec):
    """The spec as the classes read it: every key with its default filled in, nothing that is ignored.

    Two specs with equal resolved forms train alike.
    """
    return _resolve(spec)[0]


def _resolve(spec):
    name = spec.get('name', 'spec')
    check_name(name)
    for key in spec:
        if key not in TOP_KEYS:
            raise SpecError(f"{name} > {key}: key '{key}' is unknown{suggest(key, TOP_KEYS)}")
        _refuse_infinite(spec[key], f'{name} > {key}')
    for key, kind in (('agent', list), ('env', list), ('meta', dict)):
        if not isinstance(spec.get(key), kind) or not spec[key]:
            raise SpecError(f"{name}: key '{key}' is missing or empty; it must be a {kind.__name__}")
    if 'spec_params' in spec:
        raise SpecError(f'{name} > spec_params: a template is no spec that runs; spec_util.get_all expands it')
    meta = read_keys(META_KEYS, spec['meta'], f'{name} > meta', others=RUN_KEYS)
    ignored = list(meta.ignored)
    ignored += [f'{name} > {part}.{i}' for part in ('agent', 'env') for i in range(1, len(spec[part]))]
    resolved = {'meta': meta.values, 'agent': _resolve_agent(spec['agent'][0], f'{name} > agent.0', ignored)}
    resolved['env'], env_ignored = ENV_TABLES.get('env')(spec['env'][0], f'{name} > env.0')
    _check_learning_rates(resolved, f'{name} > agent.0')
    if meta.values['distributed']:
        _check_distributed(resolved, name)
    return resolved, ignored + env_ignored


def _refuse_infinite(value, where):
    """JSON has no such numbers, but readers of it take NaN, Infinity and 1e999."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f'{where}: {value} is not a finite number')
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_infinite(part, f'{where}.{key}')


def _check_learning_rates(resolved, where):
    for part in ('net', 'critic_net'):
        schedule = resolved['agent'].get(part, {}).get('lr_scheduler_spec')
        if schedule is not None:
            check_learning_rate(schedule, resolved['env']['max_frame'], f'{where}.{part}.lr_scheduler_spec')


def _check_distributed(resolved, name):
    meta, net, where = resolved['meta'], resolved['agent']['net'], f'{name} > meta.distributed'
    if meta['distributed'] == 'synced' and net.get('gpu', False) is not False:
        raise SpecError(f"{where}: 'synced' trains on the CPU; set agent.0.net.gpu to false, or use 'shared'")
    if session_max_frame(resolved) < 1:
        sessions, max_frame = meta['max_session'], resolved['env']['max_frame']
        raise SpecError(f'{where}: {sessions} workers cannot divide {max_frame} frames; raise env.0.max_frame')
    if meta['search_scheduler'] is not None:
        raise SpecError(f'{where}: a search_scheduler cannot follow trials of several workers; remove one of the two')


def session_max_frame(resolved):
    """The frames that one session of a resolved spec trains: the workers of a Hogwild trial divide max_frame."""
    meta, max_frame = resolved['meta'], resolved['env']['max_frame']
    return int(max_frame / meta['max_session']) if meta['distributed'] else max_frame


def _resolve_agent(agent, where, ignored):
    resolved = read_keys(AGENT_KEYS, agent, where).values
    algorithm_class = _named(ALGORITHMS, agent['algorithm'], 'name', f'{where}.algorithm')
    algorithm = read_keys(algorithm_class.KEYS, agent['algorithm'], f'{where}.algorithm')
    memory, memory_ignored = algorithm_class.resolve_memory(agent['memory'], f'{where}.memory')
    resolved.update(algorithm=algorithm.values, memory=memory, net={})
    ignored += algorithm.ignored + memory_ignored
    if algorithm_class.NEEDS_NET:
        resolved['net'], net_ignored = algorithm_class.resolve_net(agent.get('net', {}), f'{where}.net')
        ignored += net_ignored
    else:
        ignored += [f'{where}.net.{key}' for key in agent.get('net', {})]
    critic, place = resolved.pop('critic_net'), f'{where}.critic_net'
    if critic is not None and algorithm_class.HAS_CRITIC_SPEC:
        resolved['critic_net'], net_ignored = algorithm_class.resolve_net(critic, place)
        ignored += net_ignored
    elif critic is not None:
        ignored.append(place)
    algorithm_class.check_spec(resolved, agent, where)
    return resolved


def _named(registry, part, key, where):
    if key not in part:
        raise SpecError(f"{where}: key '{key}' is missing; it names the {registry.kind}: {', '.join(registry.names())}")
    if str(part[key]) in REMOVED:
        raise SpecError(f'{where}.{key}: {REMOVED[part[key]]}')
    return registry.get(part[key], f'{where}.{key}')


def override_spec(spec, mode):
    """Adapts a spec, in place, to a mode: `dev` and `enjoy` run one session, `test` runs a few dozen frames."""
    meta = spec['meta']
    if mode in ('dev', 'enjoy'):
        meta['max_session'] = 1
    if mode in ('dev', 'test'):
        meta['max_trial'] = 2
    if mode == 'test':
        _shorten(spec)
    return spec


def _shorten(spec):
    agent, env, meta = spec['agent'][0], spec['env'][0], spec['meta']
    algorithm = agent['algorithm']
    table = ALGORITHMS.get(algorithm['name']).KEYS
    frequency = 1 if agent['memory']['name'] in ('OnPolicyReplay', 'OnPolicyCrossEntropy') else 8  # episodes, or steps
    for key, value in (
        ('training_frequency', frequency),
        ('time_horizon', frequency),
        ('training_start_step', 1),
        ('training_iter', 1),
        ('training_batch_iter', 1),
    ):
        if key in table and table[key].read:
            algorithm[key] = value
    if algorithm.get('lam') is None and algorithm.get('num_step_returns') is not None:
        algorithm['num_step_returns'] = frequency  # which is the training frequency then
    env.update(max_frame=40, max_t=12)
    if env.get('num_envs', 1) > 1:
        env['num_envs'] = 2
    meta.update(log_frequency=10, eval_frequency=10, max_session=1)


def tick(spec, unit):
    """Advances the experiment, trial or session index of a spec, in place, and sets its paths anew."""
    meta = spec['meta']
    if unit == 'experiment':
        meta.update(experiment_ts=time.strftime('%Y_%m_%d_%H%M%S'), experiment=meta['experiment'] + 1)
        meta.update(trial=-1, session=-1)
    elif unit == 'trial':
        meta.update(experiment=max(meta['experiment'], 0), trial=meta['trial'] + 1, session=-1)
    elif unit == 'session':
        meta.update(experiment=max(meta['experiment'], 0), trial=max(meta['trial'], 0), session=meta['session'] + 1)
    else:
        raise ValueError(f"unit '{unit}' is none of experiment, trial, session")
    set_paths(spec)
    return spec


def run_folder(spec):
    """Where the run lies: `meta.predir` for one that was found on disk, else a new folder under the data directory."""
    if spec['meta'].get('predir'):
        return Path(spec['meta']['predir'])
    return paths.data_dir() / f'{spec["name"]}_{spec["meta"]["experiment_ts"]}'


def unit_name(spec):
    """`dqn_cartpole`, `dqn_cartpole_t0` or `dqn_cartpole_t0_s1`, by the indices that the spec has been ticked to."""
    meta = spec['meta']
    name = spec['name']
    if meta['trial'] >= 0:
        name += f'_t{meta["trial"]}'
    if meta['session'] >= 0:
        name += f'_s{meta["session"]}'
    return name


def copy_of(spec):
    return copy.deepcopy(spec)


def record_of(spec):
    """What a user wrote of a spec: what a checkpoint keeps, to compare with the spec that it shall go on with."""
    meta = {key: value for key, value in spec['meta'].items() if key not in RUN_KEYS}
    return copy_of({'name': spec['name'], 'agent': spec['agent'], 'env': spec['env'], 'meta': meta})


def set_paths(spec):
    """Points a spec's paths at its unit's files in the run folder. Raises: SpecError, as of `check_name`"""
    check_name(spec['name'])
    folder = run_folder(spec)
    meta = spec['meta']
    meta['prepath'] = str(folder / unit_name(spec))
    for name in FOLDERS:
        meta[f'{name}_prepath'] = str(folder / name / unit_name(spec))
    return spec


def save(spec):
    """Writes the spec of the unit it is ticked to: `{prepath}_spec.json`."""
    files.write_json(spec, f'{spec["meta"]["prepath"]}_spec.json', durable=True)


def session_spec(spec, session):
    """A copy of a trial's spec for one of its sessions."""
    spec = copy.deepcopy(spec)
    spec['meta']['session'] = session - 1
    return tick(spec, 'session')
