"""What all nets share: their spec keys, how layers are built and initialised, and the device."""

import torch
from torch import nn

from slm_lab.agent.distribution import LOG_SCALE_MAX, LOG_SCALE_MIN
from slm_lab.agent.net import optim
from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.keys import Key, leftover
from slm_lab.lib.schedule import LearningRate

# need arguments, or change the shape
_NOT_ACTIVATIONS = {'Module', 'MultiheadAttention', 'Threshold', 'NonDynamicallyQuantizableLinear', 'GLU', 'Softmax2d'}


def _torch_names(module):
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, nn.Module) and name not in _NOT_ACTIVATIONS
    }


ACTIVATIONS = _torch_names(nn.modules.activation)
LOSSES = {name: cls for name, cls in _torch_names(nn.modules.loss).items() if name.endswith('Loss') and name[0] != '_'}


def _by_name(table, name, kind, where):
    """Looks a torch class up without regard to case or underscores, as old specs name them (`relu`, `leakyrelu`)."""
    plain = {key.lower(): cls for key, cls in table.items()}
    try:
        return plain[str(name).lower().replace('_', '')]
    except KeyError:
        raise SpecError(f"{where}: {kind} '{name}' is unknown{suggest(name, table)}") from None


def build_activation(name, where='activation'):
    return _by_name(ACTIVATIONS, name, 'activation', where)()


def build_loss(spec, where='loss_spec'):
    """A torch loss by name that leaves the mean to its caller, so that items can be weighted."""
    spec = dict(spec)
    if 'name' not in spec:
        raise SpecError(f"{where}: key 'name' is missing; it names a torch loss, such as MSELoss")
    cls = _by_name(LOSSES, spec.pop('name'), 'loss', where)
    if spec.get('reduction', 'mean') != 'mean':
        raise SpecError(f"{where}.reduction: '{spec['reduction']}' is not done here, but the mean; omit the key")
    try:
        loss = cls(**{**spec, 'reduction': 'none'})
        fits = loss(torch.zeros(2), torch.ones(2)).shape == (2,)
    except (TypeError, ValueError, RuntimeError) as e:
        raise SpecError(f'{where}: torch refuses {cls.__name__} with {spec}: {e}') from None
    if not fits:
        raise SpecError(f'{where}: {cls.__name__} compares no two lists of numbers item by item, as MSELoss does')
    return loss


def _check_init_fn(name, where):
    known = [n for n in vars(nn.init) if n.endswith('_') and not n.startswith('_')]
    if name not in known:
        raise SpecError(f"{where}: '{name}' is no function of torch.nn.init{suggest(name, known)}")
    try:
        with torch.random.fork_rng(devices=[]):
            init_weights(nn.Linear(2, 2), name, None)
    except (TypeError, ValueError) as e:
        raise SpecError(f"{where}: '{name}' cannot initialise linear layers: {e}") from None


def check_sizes(sizes, where):
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise SpecError(f'{where}: {sizes} must be a list of layer sizes, whole numbers above 0')


NET_KEYS = {
    'type': Key('str', note='name of the net class'),
    'hid_layers': Key('list', validate=check_sizes, note='sizes of the hidden layers'),
    'hid_layers_activation': Key('str|null', validate=build_activation, note='a torch activation'),
    'init_fn': Key('str|null', None, validate=_check_init_fn, note='a function of torch.nn.init'),
    'log_std_init': Key(
        'number|null',
        None,
        low=LOG_SCALE_MIN,
        high=LOG_SCALE_MAX,
        note='the log standard deviation that a continuous policy starts with',
    ),
    'clip_grad_val': Key('number|null', None, above=0, note='the largest norm of the gradient'),
    'loss_spec': Key('dict', {'name': 'MSELoss'}, validate=build_loss),
    'optim_spec': Key('dict', {'name': 'Adam'}, validate=optim.check_spec),
    'lr_scheduler_spec': Key('dict|null', None, validate=lambda v, where: LearningRate(v, 1.0, where)),
    'update_type': Key('str', 'replace', choices=('replace', 'polyak'), note='how the target net follows'),
    'update_frequency': Key('int', 1, low=1, note='frames between updates of the target net'),
    'polyak_coef': Key('number|null', None, low=0, high=1, note='weight of the source in a polyak update'),
    'gpu': Key('bool|str|null', False, choices=(False, True, None, 'auto')),
    'cuda_id': leftover('written by older labs'),
    'shared': leftover('actor-critic algorithms only'),
    'use_same_optim': leftover('actor-critic algorithms only'),
    'actor_optim_spec': leftover('actor-critic algorithms only'),
    'critic_optim_spec': leftover('actor-critic algorithms only'),
    'normalize': leftover('image nets only'),
    'batch_norm': leftover('image nets only'),
}


def pick_device(gpu, place=0):
    """The device of a session's nets: sessions, counted by `place`, go round the GPUs; the CPU where there is none."""
    wanted = gpu is None or gpu == 'auto' or gpu is True
    if not (wanted and torch.cuda.is_available()):
        return torch.device('cpu')
    return torch.device('cuda', place % torch.cuda.device_count())


def build_layers(sizes, activation, norm=None):
    """Linear layers through `sizes`, an activation (or null) after each: in (B, sizes[0]) -> out (B, sizes[-1]).

    Args: norm: makes a normalisation of n features, which stands between a linear layer and its activation.
    """
    layers = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers.append(nn.Linear(n_in, n_out))
        if norm is not None:
            layers.append(norm(n_out))
        if activation is not None:
            layers.append(build_activation(activation))
    return nn.Sequential(*layers)


def init_weights(net, init_fn, activation):
    """Weights of linear, convolutional and recurrent layers by a function of torch.nn.init, biases 0; null: torch's."""
    if init_fn is None:
        return
    kwargs = {}
    plain = (activation or 'linear').lower().replace('leakyrelu', 'leaky_relu')
    if init_fn.startswith(('orthogonal', 'xavier')):
        kwargs['gain'] = _gain(plain)
    elif init_fn.startswith('kaiming'):
        kwargs['nonlinearity'] = plain if plain in ('relu', 'leaky_relu') else 'linear'
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.RNNBase)):
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith('weight'):
                    getattr(nn.init, init_fn)(parameter, **kwargs)
                else:
                    nn.init.zeros_(parameter)


def _gain(activation):
    try:
        return nn.init.calculate_gain(activation)
    except ValueError:  # torch has no recommendation for it
        return 1.0
