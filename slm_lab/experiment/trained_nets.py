"""`load_net`: a new run that starts from the trained nets of another, and the observation statistics they read by."""

import contextlib
import logging
from pathlib import Path

import numpy as np

from slm_lab.experiment import model_files, retro_analysis
from slm_lab.experiment.checkpoint import store_of
from slm_lab.lib.errors import LabError
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')


def load_net(session):
    """Starts a session from the trained nets that its spec names, if any. Returns: [path of each]"""
    source = session.resolved['agent']['load_net']
    if not source:
        return []
    paths = find_trained(source)
    missing = model_files.load_models(session.agent.algorithm, paths, with_optim=False)
    session.agent.algorithm.sync_targets(missing)
    return [model for model, _ in paths.values()]


def load_statistics(session):
    """Starts a session with the observation statistics that the trained nets of its spec, if any, read their inputs by.

    A warning says where there are none, or where only one of the two runs standardises observations.
    """
    source, standardizes = session.resolved['agent']['load_net'], session.resolved['env']['normalize_state']
    if not source:
        return
    model, _ = next(iter(find_trained(source).values()))
    spec = find_owner(model)
    if spec is not None and bool(spec['env'][0].get('normalize_state')) != standardizes:
        was, now = ('plain', 'standardised') if standardizes else ('standardised', 'plain')
        logger.warning(
            'load_net: %s was trained on %s observations, and gets %s ones here (env.normalize_state)', model, was, now
        )
    elif standardizes:
        statistics = None if spec is None else find_statistics(model, spec)
        own = session.env.state_dict()
        if statistics is not None and _shape_of(statistics) == _shape_of(own):
            session.env.load_statistics(statistics)
            logger.info('Starting from the observation statistics of %s', model)
        else:
            why = 'no checkpoint of its run holds them' if statistics is None else 'they have another shape'
            logger.warning(
                'load_net: the observation statistics of %s were not taken over: %s. They start anew, so these nets '
                'read inputs of another scale than they were trained on',
                model,
                why,
            )


def _shape_of(env_tree):
    return np.shape(env_tree['NormalizeState']['mean'])


# --- where they are


def find_trained(source):
    """Where `load_net` points: a run folder, a model prepath, or one .pt file.

    Returns: {net name: (model path, None)}
    """
    path = Path(source).expanduser()
    if path.suffix == '.pt' and path.is_file():
        return {'net': (path, None)}
    by_prefix = sorted(path.parent.glob(f'{path.name}_*_model.pt'))
    by_prefix = [p for p in by_prefix if f'_{model_files.BEST}_' not in p.name[len(path.name) :]]
    if by_prefix:
        return {p.name[len(path.name) + 1 : -len('_model.pt')]: (p, None) for p in by_prefix}
    for session in retro_analysis.find_sessions(retro_analysis.find_run(source)):
        nets = session.best_nets or session.nets
        if nets:
            return {name: (model, None) for name, (model, _) in nets.items()}
    raise LabError(f"load_net: '{source}' is no run folder with nets, no model prepath and no .pt file")


def find_owner(model):
    """The saved spec of the session that a file of a net is of, by the run folder that it lies in; None without one."""
    model = Path(model).absolute()
    for session in retro_analysis.find_sessions(model.parent.parent):
        if model.name.startswith(f'{session.name}_'):
            with contextlib.suppress(LabError):  # the nets are there, whatever became of the spec
                return retro_analysis.located_spec(session)
    return None


def find_statistics(model, spec):
    """The observation statistics that a net reads its inputs by.

    Args:
        model: file of the net
        spec: of its session, as of `find_owner`
    Returns: a tree for `load_statistics` of an env, or None: a folder that has no checkpoint has none of them.
    """
    store = store_of(spec)
    generation = store.find().generation
    if generation is None:
        return None
    if Path(model).name.startswith(f'{spec_util.unit_name(spec)}_{model_files.BEST}_'):
        best = store.best(generation)
        return best['nets'].get(model_files.STATISTICS) if best else None
    statistics = store.part(generation, 'env', 'NormalizeState')
    return None if statistics is None else {'NormalizeState': statistics}
