"""Continuing a run: which spec it goes on with, what each session restores, and the report and history of it."""

import logging
import math
import os
import platform
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from slm_lab.experiment import model_files, retro_analysis
from slm_lab.experiment.checkpoint import store_of
from slm_lab.lib import files
from slm_lab.lib.errors import LabError, ResumeError, SpecError
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
    saved = read_saved_spec(folder)
    if saved['name'] != spec_name:
        raise ResumeError(f"{for_display(folder)} is a run of spec '{saved['name']}', not of '{spec_name}'")
    timestamp = saved['meta'].get('experiment_ts')
    try:
        spec = spec_util.get(spec_file, spec_name, timestamp)
    except SpecError:
        if os.path.exists(spec_file) or _is_shipped(spec_file):
            raise
        logger.warning('%s is gone; the copy in %s is used', spec_file, for_display(folder))
        spec = spec_util.prepare(spec_util.copy_of(saved), timestamp)
    spec['meta']['predir'] = str(folder)
    was, now, frame = spec_util.resolve(saved), spec_util.resolve(spec), furthest_frame(folder)
    changes = resume_rules.compare(was, now, frame)
    _check_share(was, now, frame)
    if spec['meta'].get('random_seed') is None:
        spec['meta']['random_seed'] = saved['meta'].get('random_seed')
    return spec_util.override_spec(spec, mode), folder, changes


def _check_share(was, now, frame):
    """The workers of a Hogwild run divide max_frame: a change must not leave one less than it has trained."""
    share, sessions = spec_util.session_max_frame(now), now['meta']['max_session']
    if now['meta']['distributed'] and share < min(frame, spec_util.session_max_frame(was)):
        raise ResumeError(
            f'max_frame {now["env"]["max_frame"]} leaves each of {sessions} workers {share} frames, and one has '
            f'trained {frame} already; raise env.max_frame to {frame * sessions} or more'
        )


def _is_shipped(spec_file):
    try:
        spec_util.find_file(spec_file)
        return True
    except SpecError:
        return False


def read_saved_spec(folder):
    """The spec that a run folder holds: the experiment's, else a trial's, else a session's.

    The folder may have been renamed: its spec says what it is. One without a name (SLM Lab's) has its file's.
    Raises: ResumeError where none can be read.
    """
    # the shortest name is the experiment's
    for path in sorted(folder.glob('*_spec.json'), key=lambda path: (len(path.name), path.name)):
        try:
            spec = files.read_json(path)
            spec.setdefault('name', re.sub(r'(_t\d+(_s-?\d+)?)?_spec\.json$', '', path.name))
            if spec['meta'] and spec['agent'] and spec['env']:
                return spec
        except (LabError, AttributeError, KeyError, TypeError):
            logger.warning('%s cannot be read; the next spec is used', path)
    raise ResumeError(f'{for_display(folder)} holds no spec that can be read, so what it trained is unknown')


def furthest_frame(folder):
    """The furthest frame that any session's checkpoints or data frames have reached."""
    frames = [0]
    for session in retro_analysis.find_sessions(folder):
        store = store_of(retro_analysis.located_spec(session))
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
    max_frame = spec_util.session_max_frame(spec_util.resolve(spec))
    return generation is not None and generation.final and generation.frame >= max_frame


# --- a session


@dataclass
class Restored:
    """What a session goes on from."""

    source: str
    exact: bool
    parts: list
    missing: list = field(default_factory=list)


NOT_EXACT = (
    'exactness (Hogwild: nets and optimizers are the newest of all workers, and the order of their steps is not '
    'repeated)'
)


def restore_session(session):
    """Loads a session's newest complete checkpoint, or the classic files of a folder that has none; logs a report.

    Returns: Restored, or None where the folder holds nothing of this session, which then starts at frame 0.
    Raises: ResumeError when all there is is damaged: it never starts anew in silence.
    """
    found = session.store.find()
    for line in found.skipped:
        logger.warning('%s', line)
    classic = classic_files(session.spec)
    if found.generation is not None:
        restored = _restore_checkpoint(session, found.generation)
    elif classic is not None and (classic.nets or classic.train_csv):
        restored = _restore_classic(session, classic)
    else:
        check_resumable(session.spec)
        logger.info('Session %d has nothing to go on from and starts at frame 0', session.index)
        return None
    logger.info('%s', report(session, restored))
    return restored


def check_resumable(spec):
    """Raises: ResumeError when all that there is of a session is damaged, before anything in its run is changed."""
    store = store_of(spec)
    found, classic = store.find(), classic_files(spec)
    if found.generation is None and not store.is_unborn() and not (classic and (classic.nets or classic.train_csv)):
        raise ResumeError(
            f'{store.folder}: no checkpoint is whole, and there are no nets under model/, so nothing can be resumed '
            f'({"; ".join(found.skipped)}). Start a new run, or delete that folder to start this session anew'
        )


def _restore_checkpoint(session, generation):
    was, now = spec_util.resolve(spec_util.copy_of(generation.spec)), spec_util.copy_of(session.resolved)
    now['meta']['max_session'] = was['meta']['max_session']  # how many others there are is not this session's past
    resume_rules.compare(was, now, generation.frame)
    tree = session.store.restore(generation, session.state_dict())
    session.load_state_dict(tree)
    missing = [f'{path} (damaged: it fills anew, and training waits for it)' for path in generation.lost_rings]
    if session.env.restarted:
        slots = ', '.join(map(str, session.env.restarted))
        missing.append(f'the running episode of env {slots} (the env is not deterministic: a new episode begins)')
    if generation.lost_best:
        missing.append('the best nets (damaged)')
        session.agent.body.best_total_reward_ma = -math.inf  # so that the next good ones are kept
    if session.resolved['meta']['distributed']:
        missing.append(NOT_EXACT)
    best = session.store.best(generation)
    if best is not None:  # the classic copies may be newer than the checkpoint: of frames that are lost
        model_files.publish_best(session.spec['meta'], best['nets'])
    parts = ['nets', 'optimizers', 'data frames', 'clock', 'random generators']
    parts += [] if generation.lost_rings else ['memory']
    parts += [] if session.env.restarted else ['env']
    parts += [] if generation.lost_best else ['best']
    return Restored(f'the checkpoint of frame {generation.frame}', not missing, parts, missing)


def classic_files(spec):
    """What a run folder holds of the session that a spec is ticked to, as `retro_analysis` finds it, or None."""
    prepath = Path(spec['meta']['prepath'])
    return next((s for s in retro_analysis.find_sessions(prepath.parent) if s.name == prepath.name), None)


def _restore_classic(session, classic):
    """A folder of nets, optimizers and data frames alone, as SLM Lab v4.2 leaves it."""
    train_df, eval_df = retro_analysis.load_session_data(classic)
    if train_df is None or not len(train_df):
        raise ResumeError(
            f'{classic.name}: there are nets but no rows of a session_df_train.csv, so the frame that they are of is '
            'unknown; start a new run from them with "load_net" in the agent spec'
        )
    algorithm, body, clock = session.agent.algorithm, session.agent.body, session.clock
    absent = [name for name in algorithm.learners if name not in classic.nets]
    if absent:
        raise ResumeError(f'{classic.name}: there are rows but no {absent[0]} under model/; start a new run')
    lost = model_files.load_models(algorithm, classic.nets) if algorithm.nets else []
    algorithm.sync_targets(lost)
    body.load_data_frames(train_df, eval_df)
    last = train_df.iloc[int(train_df['frame'].argmax())]

    def known(column, absent=0):
        value = last.get(column, absent)
        return absent if math.isnan(value) else value

    clock.load_state_dict(
        {
            'frame': int(last['frame']),
            't': int(last['frame']) if clock.num_envs > 1 else 0,
            'epi': int(known('epi', -1)) + 1,  # the episode that ran then is over
            'opt_step': int(known('opt_step')),
            'wall_t': float(known('wall_t')),
        }
    )
    session.logged_frame = clock.frame
    if body.rigorous_eval:
        session.evaluated_frame = clock.frame
    algorithm.set_frame(clock.frame)
    session.env.reset()
    missing = [*lost, 'memory', 'random generators', 'the running episode', 'observation statistics']
    if not session.spec['env'][0].get('normalize_state'):
        missing.remove('observation statistics')
    parts = ['nets'] * bool(algorithm.nets) + ['data frames', 'clock', 'best']
    parts += ['optimizers'] if algorithm.nets and not any('optimizer' in name for name in lost) else []
    return Restored('the nets and data frames alone (no checkpoint)', False, parts, missing)


def report(session, restored):
    """One screen on what a session goes on from."""
    clock, agent = session.clock, session.agent
    memory, best = agent.memory, agent.body.best_total_reward_ma
    missing = '; '.join(restored.missing) if restored.missing else 'nothing'
    return '\n'.join(
        [
            f'Resumed trial {session.spec["meta"]["trial"]} session {session.index} from {restored.source}',
            f'  frame {clock.frame} of {clock.max_frame}   epi {clock.epi}   t {clock.t}   opt_step {clock.opt_step}',
            f'  explore_var {agent.algorithm.explore_var:g}   lr {agent.algorithm.lr:g}   '
            f'memory {memory.size} (of {memory.seen_size} seen)   best return {best:g}',
            f'  restored: {", ".join(restored.parts)}',
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
    line = files.dump_json(entry, indent=0).replace('\n', '') + '\n'
    with open(path, 'ab+') as f:
        if f.tell():  # a line that a crash has cut short must not swallow this one
            f.seek(-1, os.SEEK_END)
            line = line if f.read(1) == b'\n' else '\n' + line
        f.write(line.encode())
