"""The env room: `make_env` builds from a spec the vector env that an agent acts in.

- clock: frames, episodes, optimizer steps
- registration: from names to environments, and errors about them
- atari, vizdoom, legacy_gym: environments that need work to fit in
- slot: one environment that can be brought back in the middle of an episode
- vector, workers: N slots that step together, in this process or in others
- wrapper: returns, observation statistics, frame stacks, reward scaling

Specs count env keys from `env.0`; what is no key of the lab goes to `make` as a keyword.
"""

import difflib
import functools
import logging

from slm_lab.env import vizdoom
from slm_lab.env.clock import Clock
from slm_lab.env.registration import can_display, current_id, make_single
from slm_lab.env.slot import probe
from slm_lab.env.vector import Step, VectorEnv
from slm_lab.env.wrapper.stateful import FrameStack, NormalizeState, RunningStatistics, TrackReturn
from slm_lab.env.wrapper.transform import ApplyStatistics, ScaleReward
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover, read_keys
from slm_lab.lib.machine import count_cpus
from slm_lab.lib.registry import ENV_TABLES

__all__ = ['KEYS', 'Clock', 'Step', 'check_env_spec', 'make_env', 'make_raw', 'what_is_made']

logger = logging.getLogger('slm_lab.env')

RESUME_MODES = ('replay', 'fresh', 'native', 'episode')

KEYS = {
    'name': Key('str', note='an id'),
    'module': Key('str|null', None, note='a module of your own that registers the id; imported wherever it is made'),
    'frame_op': Key('str|null', None, choices=(None, 'concat', 'stack'), note='how the last frames become one'),
    'frame_op_len': Key('int|null', None, low=1, note='how many frames'),
    'normalize_state': Key('bool', False, note='standardise observations with running statistics'),
    'reward_scale': Key('number|str|null', None, note="'sign', or a factor; training only"),
    'num_envs': Key('int', 1, low=1, note='slots that step together'),
    'max_t': Key('int|null', None, low=1, note="steps per episode; null: the environment's own limit"),
    'max_frame': Key('int', low=1, note='training budget in frames, summed over the slots'),
    'resume': Key('str', 'auto', choices=('auto', *RESUME_MODES), note='how an episode is resumed'),
    'vector': Key('str', 'auto', choices=('auto', 'sync', 'async'), note='slots in this process, or in workers'),
    'cfg_name': Key('str|null', None, note=f"the scenario of the old id '{vizdoom.OLD_ID}'"),
    'image_downsize': leftover(),
    'unity': leftover(),
}


def check_env_spec(env_spec, where='env.0'):
    """Checks one env spec; returns the places of the keys that nothing reads. Raises: SpecError."""
    return _read(env_spec, where)[2]


@ENV_TABLES.register
def env(env_spec, where):
    """What the spec room looks up. Returns: (every key that is read, with defaults; places of ignored keys)."""
    values, kwargs, ignored = _read(env_spec, where)
    return {**values, **kwargs}, ignored


def what_is_made(env_spec):
    """(id, max_t, keywords) with which the environment of an env spec is made; the spec need not be complete.

    Raises: SpecError for an old ViZDoom spec without a known scenario.
    """
    kwargs = {key: value for key, value in env_spec.items() if key not in KEYS}
    name = env_spec['name']
    if env_spec.get('module') is not None:
        return name, env_spec.get('max_t'), kwargs  # what the user registers is no old id, whatever it is called
    if name == vizdoom.OLD_ID:
        name, old_meaning = vizdoom.current_scenario(env_spec.get('cfg_name'), 'env.0')
        kwargs = {**old_meaning, **kwargs}
    return current_id(name), env_spec.get('max_t'), kwargs


def make_raw(env_spec, where='env.0', render=False):
    """One environment as the spec names it, with its keywords and time limit, without the lab's vector wrappers.

    Raises: SpecError
    """
    return make_single(*what_is_made(env_spec), render, where, env_spec.get('module'))


def make_env(spec, seed, *, evaluating=False, train_env=None, num_envs=None, render=False):
    """Builds the vector env of a spec.

    Args:
        spec: the whole spec.
        seed: the seed that the slots derive their generators from.
        evaluating: rewards are not scaled, and observation statistics are read, never added to.
        train_env: whose statistics and way of resuming evaluation shares.
        num_envs: instead of the spec's.
        render: show the first slot in a window, where there is a display.
    Returns: an env with `num_envs, name, observation_space, action_space, max_t, state, total_reward, restarted`,
        `reset() -> (N, *shape)`, `step(actions) -> Step`, `state_dict()`, `load_state_dict(tree)`, `close()`.
    Raises: SpecError
    """
    where = f'{spec["name"]} > env.0' if spec.get('name') else 'env.0'
    values, _, _ = _read(spec['env'][0], where)
    frame_op, frame_op_len = _frame_op(spec, values, where)
    name, _, kwargs = what_is_made(spec['env'][0])
    if name != values['name'] and train_env is None:
        logger.info("env '%s' is an old id, running '%s'", values['name'], name)
    # a life that is lost ends an episode in training alone: returns that are compared are those of whole games
    life_loss = not evaluating
    build = functools.partial(
        make_single, name, values['max_t'], kwargs, where=where, module=values['module'], life_loss=life_loss
    )
    inner = VectorEnv(
        values['name'],
        build,
        num_envs or values['num_envs'],
        seed,
        resume=values['resume'],
        probe=train_env.unwrapped.resume_mode if train_env else functools.partial(probe, build, seed),
        build_first=functools.partial(build, render=True) if render and _has_display(values['name']) else None,
        vector=values['vector'],
        # one slot says nothing about where several should be
        pick=train_env.unwrapped.vector_mode if train_env and train_env.num_envs > 1 else None,
        cpus=_cpus_per_session(spec),
    )
    wrapped = TrackReturn(inner)
    if values['normalize_state'] and evaluating:
        wrapped = ApplyStatistics(wrapped, _statistics(train_env, wrapped))
    elif values['normalize_state']:
        wrapped = NormalizeState(wrapped)
    if frame_op:
        wrapped = FrameStack(wrapped, frame_op, frame_op_len)
    if values['reward_scale'] is not None and not evaluating:
        wrapped = ScaleReward(wrapped, values['reward_scale'])
    return wrapped


def _read(env_spec, where):
    """Returns: (values of the lab's keys with defaults, keywords for make, places of ignored keys)."""
    kwargs = {key: value for key, value in env_spec.items() if key not in KEYS} if isinstance(env_spec, dict) else {}
    for key in kwargs:
        # close, but not as close as ALE's keyword 'mode' is to 'module'
        close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.82)
        if close:
            raise SpecError(f"{where}.{key}: key '{key}' is unknown; did you mean '{close[0]}'?")
        if key in ('max_episode_steps', 'id', 'disable_env_checker'):
            raise SpecError(f"{where}.{key}: the lab sets this itself; use 'max_t' for the length of an episode")
    if kwargs.get('render_mode') == 'human':
        raise SpecError(
            f"{where}.render_mode: the lab opens windows itself, where there is a display: remove the key; 'dev' and "
            "'enjoy' show the env unless RENDER=false, 'train' does with RENDER=true"
        )
    checked = read_keys(KEYS, env_spec, where, others=kwargs)
    values = checked.values
    if values['name'] == vizdoom.OLD_ID:
        vizdoom.current_scenario(values['cfg_name'], where)
    elif 'cfg_name' in env_spec:
        checked.ignored.append(f'{where}.cfg_name')
    if isinstance(values['reward_scale'], str) and values['reward_scale'] != 'sign':
        raise SpecError(f"{where}.reward_scale: '{values['reward_scale']}' is unknown; it is a number, 'sign' or null")
    if (values['frame_op'] is None) != (values['frame_op_len'] is None):
        absent, present = ('frame_op', 'frame_op_len') if values['frame_op'] is None else ('frame_op_len', 'frame_op')
        raise SpecError(f"{where}: '{present}' is given without '{absent}'")
    return values, kwargs, checked.ignored


def _frame_op(spec, values, where):
    """A recurrent net reads its sequence from a stack of frames: its seq_len decides."""
    op, length = values['frame_op'], values['frame_op_len']
    seq_len = spec['agent'][0].get('net', {}).get('seq_len') if spec.get('agent') else None
    if seq_len is None:
        return op, length
    if op is not None and (op, length) != ('stack', seq_len):
        logger.info("%s.frame_op: 'stack' of the net's seq_len %d instead of '%s' of %d", where, seq_len, op, length)
    return 'stack', seq_len


def _statistics(train_env, wrapped):
    """Those of the training env, or empty ones for `load_statistics`."""
    while train_env is not None and train_env is not train_env.unwrapped:
        if isinstance(train_env, NormalizeState):
            return train_env.statistics
        train_env = train_env.env
    return RunningStatistics(wrapped.observation_space.shape)


def _cpus_per_session(spec):
    """A trial's sessions run side by side, as many at once as there are CPUs."""
    cpus = count_cpus()
    return cpus // min(spec.get('meta', {}).get('max_session', 1), cpus)


def _has_display(name):
    if not can_display():
        logger.info("env '%s': there is no display here, so nothing is rendered", name)
        return False
    return True
