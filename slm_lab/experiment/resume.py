"""Continuing a run: which spec it goes on with, what each session restores, and the report and history of it."""

import json
import logging
import math
import os
import platform
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from slm_lab.experiment import model_files, retro_analysis
from slm_lab.experiment.session import store_of
from slm_lab.lib import files
from slm_lab.lib.errors import ResumeError, SpecError
from slm_lab.lib.paths import for_display
from slm_lab.spec import resume_rules, spec_util

logger = logging.getLogger('slm_lab.experiment')


# --- the run


def open_run(prename, spec_file, spec_name, mode):
    """Finds a run and the spec that it goes on with: the spec file as it is now, checked against the run's past.

    Args:
        prename: run folder in any of its forms, or `latest`
        mode: `train` or `dev`
    Returns: (spec with its paths in the run folder, run folder, [(place, was, is)] of the changes taken over)
    Raises: ResumeError when there is no such run, or when a change in the spec would have altered its past.
    """
    folder = retro_analysis.find_run(prename, spec_name)
    name, timestamp = split_run_name(folder)
    if name != spec_name:
        raise ResumeError(f"{for_display(folder)} is a run of spec '{name}', not of '{spec_name}'")
    saved = read_saved_spec(folder, name)
    try:
        spec = spec_util.get(spec_file, spec_name, timestamp)
    except SpecError:
        if os.path.exists(spec_file) or _is_shipped(spec_file):
            raise
        logger.warning('%s is gone; the copy in %s is used', spec_file, for_display(folder))
        spec = spec_util.prepare(json.loads(json.dumps(saved)), timestamp)
    spec['meta']['predir'] = str(folder)
    spec_util.override_spec(spec, mode)
    was, now = spec_util.resolve(saved), spec_util.resolve(spec)
    changes = resume_rules.compare(was, now, furthest_frame(folder, name))
    if spec['meta'].get('random_seed') is None:
        spec['meta']['random_seed'] = saved['meta'].get('random_seed')
    return spec, folder, changes


def _is_shipped(spec_file):
    try:
        spec_util.find_file(spec_file)
        return True
    except SpecError:
        return False


def split_run_name(folder):
    """('dqn_cartpole', '2026_01_31_120000') of data/dqn_cartpole_2026_01_31_120000."""
    name, *stamp = Path(folder).name.rsplit('_', 4)
    if len(stamp) != 4 or not all(part.isdigit() for part in stamp):
        raise ResumeError(f"{for_display(folder)}: a run folder's name ends in a timestamp _YYYY_MM_DD_HHMMSS")
    return name, '_'.join(stamp)


def read_saved_spec(folder, name):
    """The spec that a run folder holds: the experiment's, else a trial's, else a session's."""
    candidates = [folder / f'{name}_spec.json', *sorted(folder.glob(f'{name}_t*_spec.json'))]
    for path in candidates:
        if path.is_file():
            spec = files.read_json(path)
            spec.setdefault('name', name)
            return spec
    raise ResumeError(f'{for_display(folder)} holds no {name}_spec.json, so what it trained is unknown')


def furthest_frame(folder, name):
    """The furthest frame that any session's checkpoints or data frames have reached."""
    frames = [0]
    for session in retro_analysis.find_sessions(folder):
        store = store_of({'meta': {'prepath': str(folder / session.name)}})
        generation = store.find().generation
        if generation is not None:
            frames.append(generation.frame)
        else:
            train_df, _ = retro_analysis.load_session_data(session)
            if train_df is not None and len(train_df):
                frames.append(int(train_df['frame'].max()))
    return max(frames)


def is_finished(spec):
    """Whether a session's newest checkpoint says that it has reached the spec's max_frame."""
    generation = store_of(spec).find().generation
    max_frame = spec_util.resolve(spec)['env']['max_frame']
    return generation is not None and generation.final and generation.frame >= max_frame


# --- a session


@dataclass
class Restored:
    """What a session goes on from."""

    source: str
    exact: bool
    missing: list = field(default_factory=list)


def restore_session(session):
    """Loads a session's newest complete checkpoint, or the classic files of a folder that has none; logs a report.

    Returns: Restored, or None where the folder holds nothing of this session, which then starts at frame 0.
    Raises: ResumeError when all there is is damaged: it never starts anew in silence.
    """
    found = session.store.find()
    for line in found.skipped:
        logger.warning('%s', line)
    classic = _classic_files(session)
    if found.generation is not None:
        restored = _restore_checkpoint(session, found.generation)
    elif classic is not None and classic.nets:
        restored = _restore_classic(session, classic)
    elif found.skipped:
        raise ResumeError(
            f'{session.store.folder}: no checkpoint is whole, and there are no nets under model/; nothing can be '
            'resumed. Start a new run'
        )
    else:
        logger.info('Session %d has nothing to go on from and starts at frame 0', session.index)
        return None
    logger.info('%s', report(session, restored))
    return restored


def _restore_checkpoint(session, generation):
    if generation.fingerprint != session.fingerprint:
        raise ResumeError(
            f'{session.store.folder}: the checkpoint of frame {generation.frame} was made by another spec than the '
            "run folder's; restore the spec, or start a new run"
        )
    tree = session.store.restore(generation, session.state_dict())
    session.load_state_dict(tree)
    missing = [f'{path} (damaged: it fills anew, and training waits for it)' for path in generation.lost_rings]
    if session.env.restarted:
        slots = ', '.join(map(str, session.env.restarted))
        missing.append(f'the running episode of env {slots} (the env is not deterministic: a new episode begins)')
    best = session.store.best(generation)
    if best is not None:  # the classic copies may be newer than the checkpoint: of frames that are lost
        stems = {k: v for k, v in best['nets'].items() if k != 'statistics'}
        model_files.publish_models(session.spec['meta'], stems, model_files.BEST)
    return Restored(f'the checkpoint of frame {generation.frame}', exact=not missing, missing=missing)


def _classic_files(session):
    name = Path(session.spec['meta']['prepath']).name
    folder = Path(session.spec['meta']['prepath']).parent
    return next((s for s in retro_analysis.find_sessions(folder) if s.name == name), None)


def _restore_classic(session, classic):
    """A folder of nets, optimizers and data frames alone, as SLM Lab v4.2 leaves it."""
    train_df, eval_df = retro_analysis.load_session_data(classic)
    if train_df is None or not len(train_df):
        raise ResumeError(
            f'{classic.name}: there are nets but no rows of a session_df_train.csv, so the frame that they are of is '
            'unknown; start a new run from them with "load_net" in the agent spec'
        )
    lost = model_files.load_models(session.agent.algorithm, classic.nets)
    body, clock = session.agent.body, session.clock
    body.load_data_frames(train_df, eval_df)
    last = train_df.iloc[int(train_df['frame'].argmax())]
    clock.load_state_dict(
        {
            'frame': int(last['frame']),
            't': 0,
            'epi': 0 if math.isnan(last.get('epi', 0)) else int(last.get('epi', 0)) + 1,
            'opt_step': int(last.get('opt_step', 0)),
            'wall_t': float(last.get('wall_t', 0)),
        }
    )
    session.logged_frame = clock.frame
    if body.rigorous_eval:
        session.evaluated_frame = clock.frame
    session.agent.algorithm.set_frame(clock.frame)
    session.env.reset()
    missing = [*lost, 'memory', 'random generators', 'the running episode', 'observation statistics']
    if not session.spec['env'][0].get('normalize_state'):
        missing.remove('observation statistics')
    return Restored('the nets and data frames alone (no checkpoint)', exact=False, missing=missing)


def report(session, restored):
    """One screen on what a session goes on from."""
    clock, agent = session.clock, session.agent
    memory, best = agent.memory, agent.body.best_total_reward_ma
    missing = '; '.join(restored.missing) if restored.missing else 'nothing'
    restored_parts = ['nets', 'optimizers', 'data frames', 'clock']
    if restored.source.startswith('the checkpoint'):
        restored_parts += ['memory', 'env', 'random generators', 'best']
    return '\n'.join(
        [
            f'Resumed trial {session.spec["meta"]["trial"]} session {session.index} from {restored.source}',
            f'  frame {clock.frame} of {clock.max_frame}   epi {clock.epi}   t {clock.t}   opt_step {clock.opt_step}',
            f'  explore_var {agent.algorithm.explore_var:g}   lr {agent.algorithm.lr:g}   '
            f'memory {memory.size} (of {memory.seen_size} seen)   best return {best:g}',
            f'  restored: {", ".join(restored_parts)}',
            '  rebuilt from the spec: schedules, learning-rate schedules, wrappers',
            f'  missing: {missing}',
        ]
    )


# --- history


def add_history(folder, name, event, **details):
    """Appends one line to the run's history, which is never rewritten: `info/{name}_history.jsonl`."""
    entry = {
        'event': event,
        'time': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'git_sha': spec_util.git_sha(),
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'numpy': numpy.__version__},
        **details,
    }
    path = Path(folder) / 'info' / f'{name}_history.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a', encoding='utf-8') as f:
        f.write(files.dump_json(entry, indent=0).replace('\n', '') + '\n')
