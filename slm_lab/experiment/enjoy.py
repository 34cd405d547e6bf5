"""`enjoy@`: plays the best nets of a run. It writes nothing, anywhere."""

import logging
from pathlib import Path

from slm_lab.experiment import model_files, resume, retro_analysis
from slm_lab.experiment.checkpoint import store_of
from slm_lab.experiment.retro_analysis import located_spec
from slm_lab.experiment.session import Session
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.lib.paths import for_display
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')


def find_session_spec(prename, spec_name):
    """The saved spec of the session to play: the best one of those that a run folder, or a spec file in it, is of.

    Returns: (spec, run folder)
    """
    path = Path(prename).expanduser()
    if path.suffix == '.json':
        folder = path.absolute().parent if path.is_file() else retro_analysis.find_run(str(path.parent), spec_name)
        if not (folder / path.name).is_file():
            raise ResumeError(f"enjoy: there is no file '{prename}'")
        unit = path.name.removesuffix('_spec.json')  # of a session, a trial or the whole run
        sessions = [s for s in retro_analysis.find_sessions(folder) if f'{s.name}_'.startswith(f'{unit}_')]
    else:
        folder = retro_analysis.find_run(prename, spec_name)
        sessions = retro_analysis.find_sessions(folder)
    playable = [s for s in sessions if s.best_nets or store_of(located_spec(s)).find().generation]
    if not playable:
        raise ResumeError(
            f'{for_display(folder)} holds no best nets to play: no episode had ended when it last saved, or its '
            'algorithm has no nets'
        )
    best = max(playable, key=lambda s: _best_value(s))
    return located_spec(best), folder


def _best_value(session):
    store = store_of(located_spec(session))
    generation = store.find().generation
    best = store.best(generation) if generation else None
    if best:
        return best['value']
    train_df, _ = retro_analysis.load_session_data(session)
    value = float('nan') if train_df is None else train_df['total_reward_ma'].max()
    return value if value == value else float('-inf')


def play(spec, stop):
    """Plays whole episodes by the final policy until max_frame or a stop. Returns: [return of each episode]"""
    spec_util.check(spec)
    session = Session(spec, 'enjoy', stop, store=False)
    _load_best(session, spec)
    env, returns, running = session.env, [], 0.0
    state = env.reset()
    while session.clock.frame < session.clock.max_frame and not stop():
        step = env.step(session.agent.to_env(session.agent.act(state, evaluating=True)))
        session.clock.tick_step(step.terminated | step.truncated)
        running += float(step.reward[0])
        if step.terminated[0] or step.truncated[0]:
            returns.append(running)
            logger.info('episode %d: return %g', len(returns), running)
            running = 0.0
        state = step.state
    env.close()
    return returns


def _load_best(session, spec):
    store = store_of(spec)
    generation = store.find().generation
    best = store.best(generation) if generation else None
    algorithm = session.agent.algorithm
    if best is not None:
        for name, net in algorithm.nets.items():
            net.load_state_dict(best['nets'][f'{name}_model'])
        if model_files.STATISTICS in best['nets']:
            session.env.load_statistics(best['nets'][model_files.STATISTICS])
        logger.info('Playing the best nets, of frame %d, return %g', best['frame'], best['value'])
        return
    files_of = resume.classic_files(spec)
    if algorithm.nets and (files_of is None or not files_of.best_nets):
        name = spec_util.unit_name(spec)
        raise LabError(f'{name}: there are no best nets to play: no episode had ended when it last saved')
    if algorithm.nets:
        model_files.load_models(algorithm, files_of.best_nets, with_optim=False)
