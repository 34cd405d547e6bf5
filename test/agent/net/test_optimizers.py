"""Lookahead and the optimizers whose state processes can share."""

import pytest
import torch
from agent_cases import net_spec

from slm_lab.agent.net.optim import Learner, build_optimizer
from slm_lab.experiment import model_files
from slm_lab.experiment.state_file import load_plain
from slm_lab.lib.errors import ResumeError, SpecError
from slm_lab.lib.state import check_tree, first_difference, snapshot

LOOKAHEADS = [
    {'name': 'Lookahead', 'lr': 0.1, 'k': 3, **inner}
    for inner in (
        {},
        {'optimizer': 'SGD', 'momentum': 0.9},
        {'optimizer': 'Adam'},
        {'optimizer': 'GlobalAdam'},
        {'optimizer': 'GlobalRMSprop', 'weight_decay': 0.1},
    )
]
GLOBALS = [{'name': 'GlobalAdam', 'lr': 0.1, 'weight_decay': 0.1}, {'name': 'GlobalRMSprop', 'lr': 0.1, 'alpha': 0.8}]


def parameters():
    return [torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]])), torch.nn.Parameter(torch.tensor([0.25]))]


def steps(optim, params, start, stop):
    """Steps along gradients which depend on the step and the weights; returns the weights after each."""
    seen = []
    for i in range(start, stop):
        for p in params:
            p.grad = torch.sin(p.detach() * (i + 1)) + 0.1 * i
        optim.step()
        seen.append(snapshot([p.detach() for p in params]))
    return seen


def one_weight(**keys):
    """A weight of 1 and an SGD Lookahead of lr 0.1; returns a function which steps it along the gradient 1."""
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optim = build_optimizer([p], {'name': 'Lookahead', 'optimizer': 'SGD', 'lr': 0.1, **keys})

    def step():
        p.grad = torch.ones(1)
        optim.step()
        return p.item()

    return p, optim, step


# --- Lookahead


def test_every_k_steps_the_weights_go_back_to_between_fast_and_slow():
    """lr 0.1, k 2, alpha 0.25: fast 1 → 0.9 → 0.8, slow 1 − 0.25 · 0.2 = 0.95; from there the same again."""
    _, _, step = one_weight(alpha=0.25, k=2)
    assert [step() for _ in range(5)] == pytest.approx([0.9, 0.95, 0.85, 0.9, 0.8])


def test_alpha_is_a_half_and_k_is_5_unless_the_spec_says_so():
    """Fast 1 → 0.5 in 5 steps, slow 1 − 0.5 · 0.5 = 0.75."""
    _, _, step = one_weight()
    assert [step() for _ in range(6)] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.75, 0.65])


def test_weights_loaded_before_the_first_step_are_what_the_slow_ones_start_from():
    """From 5 with k 1 and alpha 0.5: 5 − 0.05 a step; slow weights of 1 would pull it to 2.95."""
    p, _, step = one_weight(k=1)
    with torch.no_grad():
        p.fill_(5.0)
    assert [step(), step()] == pytest.approx([4.95, 4.9])


def test_the_inner_optimizer_is_radam_unless_the_spec_names_another():
    old = build_optimizer(parameters(), {'name': 'Lookahead', 'optimizer': 'RAdam', 'lr': 1e-3})
    assert isinstance(old.inner, torch.optim.RAdam) and old.param_groups[0]['lr'] == 1e-3
    assert isinstance(build_optimizer(parameters(), {'name': 'Lookahead'}).inner, torch.optim.RAdam)
    inner = build_optimizer(parameters(), {'name': 'Lookahead', 'optimizer': 'Adam', 'eps': 1e-3}).inner
    assert inner.param_groups[0]['fused'] is True and inner.param_groups[0]['eps'] == 1e-3


@pytest.mark.parametrize('loaded', [False, True])
def test_a_learning_rate_schedule_reaches_the_inner_optimizer(loaded):
    """Learning rate 0.1 halves at frame 10: a step along the gradient 1 is 0.1 and then 0.05."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    optim_spec = {'name': 'Lookahead', 'optimizer': 'SGD', 'lr': 0.1}
    scheduler = {'name': 'StepLR', 'step_size': 10, 'gamma': 0.5}
    one = Learner(net, net_spec(optim_spec=optim_spec, lr_scheduler_spec=scheduler, clip_grad_val=None))
    if loaded:
        one.load_optim(snapshot(one.optim.state_dict()))
    weights = []
    for frame in (0, 10):
        one.set_frame(frame)
        one.step(net(torch.ones(1)).sum())
        weights.append(net.weight.item())
    assert weights == pytest.approx([0.9, 0.85]) and one.lr == 0.05


@pytest.mark.parametrize(
    ('keys', 'line'),
    [
        ({'optimizer': 'RAdamm'}, "here.optimizer: optimizer 'RAdamm' is unknown; did you mean 'RAdam'? Known: "),
        ({'optimizer': 'Lookahead'}, "here.optimizer: optimizer 'Lookahead' is unknown"),
        ({'optimizer': {'name': 'SGD'}}, "here.optimizer: optimizer '{'name': 'SGD'}' is unknown"),
        (
            {'optimizer': 'Adam', 'beta': 1},
            "here.beta: Adam takes no 'beta'; did you mean 'betas'? Known: alpha, amsgrad",
        ),
        ({'alhpa': 0.5}, "here.alhpa: RAdam takes no 'alhpa'; did you mean 'alpha'?"),
        ({'optimizer': 'SGD', 'lr': -1}, "here: torch refuses SGD with {'lr': -1"),
        ({'alpha': 0}, 'here.alpha: 0 is no number in (0, 1]'),
        ({'alpha': 1.5}, 'here.alpha: 1.5 is no number'),
        ({'alpha': 'x'}, "here.alpha: 'x' is no number"),
        ({'k': 0}, 'here.k: 0 is no whole number'),
        ({'k': 2.5}, 'here.k: 2.5 is no whole number'),
        ({'k': True}, 'here.k: True is no whole number'),
    ],
)
def test_a_wrong_lookahead_is_refused(keys, line):
    with pytest.raises(SpecError) as e:
        build_optimizer(parameters(), {'name': 'Lookahead', **keys}, 'here')
    assert str(e.value).startswith(line)


def test_the_state_of_another_optimizer_is_refused_and_changes_nothing():
    params = parameters()
    optim = build_optimizer(params, LOOKAHEADS[2])
    steps(optim, params, 0, 2)
    before = snapshot(optim.state_dict())
    adam = build_optimizer(parameters(), {'name': 'Adam'}).state_dict()
    with pytest.raises(ResumeError, match='holds no slow weights'):
        optim.load_state_dict(adam)
    with pytest.raises(ResumeError, match=r'shapes \[\(1,\)\] in the state and \[\(2, 2\), \(1,\)\] by the spec'):
        optim.load_state_dict({**adam, 'lookahead': {'steps': torch.tensor(2), 'slow': [torch.ones(1)]}})
    assert first_difference(optim.state_dict(), before) is None


# --- shared state


@pytest.mark.parametrize('keys', [{}, {'weight_decay': 0.1, 'eps': 1e-3, 'betas': (0.5, 0.9)}, {'fused': False}])
def test_global_adam_is_adam(keys):
    ours, torchs = parameters(), parameters()
    seen = steps(build_optimizer(ours, {'name': 'GlobalAdam', **keys}), ours, 0, 7)
    wanted = steps(build_optimizer(torchs, {'name': 'Adam', **keys}), torchs, 0, 7)
    assert first_difference(seen, wanted) is None


@pytest.mark.parametrize('keys', [{}, {'weight_decay': 0.1, 'eps': 1e-3, 'alpha': 0.7, 'lr': 0.5}])
def test_global_rmsprop_is_rmsprop(keys):
    ours, torchs = parameters(), parameters()
    seen = steps(build_optimizer(ours, {'name': 'GlobalRMSprop', **keys}), ours, 0, 7)
    wanted = steps(build_optimizer(torchs, {'name': 'RMSprop', **keys}), torchs, 0, 7)
    assert first_difference(seen, wanted) is None


@pytest.mark.parametrize(('name', 'like'), [('GlobalAdam', 'Adam'), ('GlobalRMSprop', 'RMSprop')])
def test_the_state_is_there_before_the_first_step_and_of_the_same_form_as_torchs(name, like):
    params, torchs = parameters(), parameters()
    state = build_optimizer(params, {'name': name}).state_dict()['state']
    theirs = build_optimizer(torchs, {'name': like})
    steps(theirs, torchs, 0, 1)

    def form(state):
        return {i: {k: (t.dtype, t.shape, t.device) for k, t in own.items()} for i, own in state.items()}

    assert form(state) == form(theirs.state_dict()['state'])
    assert all(not t.any() for own in state.values() for t in own.values())


@pytest.mark.parametrize('spec', [*GLOBALS, *LOOKAHEADS[3:]], ids=str)
def test_shared_state_stays_shared_through_steps_and_loading(spec):
    params = parameters()
    optim = build_optimizer(params, spec)
    saved = snapshot(optim.state_dict())
    optim.share_memory()
    tensors = [*tensors_of(optim.state_dict())]
    steps(optim, params, 0, 4)
    optim.load_state_dict(saved)
    steps(optim, params, 0, 4)
    after = [*tensors_of(optim.state_dict())]
    assert len(after) == len(tensors) >= 4
    for tensor, was in zip(after, tensors, strict=True):
        assert tensor.is_shared() and tensor.data_ptr() == was.data_ptr()


def tensors_of(tree):
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_of(value)


@pytest.mark.parametrize('spec', GLOBALS, ids=str)
def test_a_state_without_moments_is_that_before_the_first_step(spec):
    params = parameters()
    optim = build_optimizer(params, spec)
    before = snapshot(optim.state_dict())
    steps(optim, params, 0, 3)
    optim.load_state_dict({**before, 'state': {}})
    assert first_difference(optim.state_dict(), before) is None


def test_lookahead_over_an_optimizer_that_cannot_be_shared_says_so():
    with pytest.raises(SpecError, match="Lookahead over RAdam cannot be shared by processes: write 'GlobalAdam'"):
        build_optimizer(parameters(), {'name': 'Lookahead'}).share_memory()


# --- state


@pytest.mark.parametrize('done', [0, 1, 3, 5])
@pytest.mark.parametrize('spec', [*GLOBALS, *LOOKAHEADS], ids=str)
def test_steps_after_loading_are_those_without_a_break(spec, done):
    """Before the first step, between two synchronizations of k 3, and on one."""
    params = parameters()
    optim = build_optimizer(params, spec)
    steps(optim, params, 0, done)
    check_tree(optim.state_dict())
    state, weights = snapshot(optim.state_dict()), snapshot([p.detach() for p in params])

    others = [torch.nn.Parameter(w) for w in weights]
    resumed = build_optimizer(others, spec)
    steps(resumed, others, 0, 2)  # what loading does not replace would show
    with torch.no_grad():
        for p, w in zip(others, snapshot([p.detach() for p in params]), strict=True):
            p.copy_(w)
    resumed.load_state_dict(snapshot(state))
    assert first_difference(resumed.state_dict(), state) is None
    assert first_difference(steps(resumed, others, done, 9), steps(optim, params, done, 9)) is None
    assert first_difference(resumed.state_dict(), optim.state_dict()) is None


@pytest.mark.parametrize('spec', [*GLOBALS, *LOOKAHEADS], ids=str)
def test_the_file_of_an_optimizer_is_read_without_running_code(spec, tmp_path):
    params = parameters()
    optim = build_optimizer(params, spec)
    steps(optim, params, 0, 4)
    model_files.publish_models({'model_prepath': str(tmp_path / 'a_t0_s0')}, {'net_optim': optim.state_dict()})
    read = load_plain(tmp_path / 'a_t0_s0_net_optim.pt')
    assert first_difference(read, optim.state_dict()) is None
