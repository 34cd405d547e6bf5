"""The classic files of a session, which people and scripts read: `model/*.pt` and `info/*_session_df_*.csv`.

They are copies for reading. A run is resumed from its checkpoint store; these serve only folders that have none.
"""

import io
import logging

import torch

from slm_lab.experiment.state_file import load_plain
from slm_lab.lib import files
from slm_lab.lib.errors import ResumeError

logger = logging.getLogger('slm_lab.experiment')

BEST = 'ckpt-best'
STATISTICS = 'statistics'  # of observations, kept with the best nets, which play by them


def trained_state(algorithm):
    """{file stem: state dict}: `{net}_model` of every net, `{net}_optim` of every trained one."""
    stems = {f'{name}_model': net.state_dict() for name, net in algorithm.nets.items()}
    stems.update({f'{name}_optim': learner.optim.state_dict() for name, learner in algorithm.learners.items()})
    return stems


def publish(meta, algorithm, body, best=None):
    """Brings the classic files up to date with a session whose checkpoint is complete.

    They are copies: where they cannot be written, one line says so, and the next checkpoint tries again.

    Args:
        best: new best {file stem: state dict}, or None
    """
    try:
        publish_models(meta, trained_state(algorithm))
        if best is not None:
            publish_best(meta, best)
        publish_data_frames(meta, body)
    except OSError as e:
        logger.warning('the copies of nets and rows for reading could not be written (the checkpoint is whole): %s', e)


def publish_models(meta, stems, tag=''):
    """Writes `{model_prepath}_{stem}.pt`, or `{model_prepath}_{tag}_{stem}.pt`."""
    for stem, state in stems.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        prefix = f'{meta["model_prepath"]}_{tag}_' if tag else f'{meta["model_prepath"]}_'
        files.write_atomic(f'{prefix}{stem}.pt', buffer.getvalue())


def publish_best(meta, trained):
    publish_models(meta, {stem: state for stem, state in trained.items() if stem != STATISTICS}, BEST)


def publish_data_frames(meta, body):
    """`eval_df` is `train_df` where no evaluation has rows of its own: written out twice, put into words once."""
    train = files.dump_csv(body.train_df)
    for mode, content in (('train', train), ('eval', files.dump_csv(body.eval_df) if body.rigorous_eval else train)):
        files.write_atomic(f'{meta["info_prepath"]}_session_df_{mode}.csv', content)


def load_models(algorithm, paths, with_optim=True):
    """Loads nets, and optimizers where there are files of them.

    Args:
        paths: {net name: (model path, optim path or None)}
    Returns: names of what the algorithm has and the files lack, e.g. ['target_net', 'net optimizer'].
    Raises: LabError naming the first tensor whose shape differs, before any net is changed.
    """
    states = {name: load_plain(model) for name, (model, _) in paths.items() if name in algorithm.nets}
    if not states:
        raise ResumeError(
            f'{", ".join(str(model) for model, _ in paths.values())}: none of these is a net of '
            f'{type(algorithm).__name__}, which has {", ".join(algorithm.nets) or "none"}'
        )
    for name, state in states.items():
        _check_shapes(algorithm.nets[name], state, f'{paths[name][0]} does not fit {name}')
    for name, state in states.items():
        algorithm.nets[name].load_state_dict(state)
    missing = [name for name in algorithm.nets if name not in states]
    for name, learner in algorithm.learners.items():
        optim_path = paths.get(name, (None, None))[1]
        if with_optim and optim_path:
            learner.load_optim(load_plain(optim_path))
        elif with_optim:
            missing.append(f'{name} optimizer')
    return missing


def _check_shapes(net, state, where):
    own = net.state_dict()
    if not isinstance(state, dict):
        raise ResumeError(f'{where}: it holds a {type(state).__name__} and not the tensors of a net by name')
    for key in [*own, *(k for k in state if k not in own)]:
        was = tuple(getattr(state[key], 'shape', ())) if key in state else 'nothing'
        wanted = tuple(own[key].shape) if key in own else 'nothing'
        if was != wanted:
            raise ResumeError(f'{where}: {key} is {was} there and {wanted} by the spec')
