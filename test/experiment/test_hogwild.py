"""Hogwild: workers that train one set of nets; frames divided, global nets resumed from the newest, refusals."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import lab_process
import pytest
import torch
from resume import raw_spec, session_spec

from slm_lab.agent.net.optim import Learner
from slm_lab.experiment import hogwild, resume
from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trained_nets import load_net
from slm_lab.experiment.verify import verify_run
from slm_lab.lib.errors import MachineError, ResumeError, SpecError
from slm_lab.spec import spec_util

GLOBAL_ADAM = {'name': 'GlobalAdam', 'lr': 0.02}


def hogwild_spec(distributed='synced', optim=GLOBAL_ADAM, max_session=2, nets=(), meta=(), env=()):
    """A3C with a net for the policy and one for values."""
    return raw_spec(
        'ActorCritic',
        'OnPolicyBatchReplay',
        algo={'action_pdtype': 'default', 'action_policy': 'default', 'explore_var_spec': None, 'lam': 0.9},
        nets={'shared': False, 'use_same_optim': True, 'optim_spec': optim, **dict(nets)},
        env=dict(env),
        meta={'distributed': distributed, 'max_session': max_session, **dict(meta)},
    )


def specs_of(folder, raw):
    return [session_spec(folder, raw, index) for index in range(raw['meta']['max_session'])]


def build_worker(spec, shared, restored=False):
    worker = hogwild.Worker(spec, 'train', StopRequest(), shared)
    worker.join(restored)
    return worker


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.net.state_dict().items()}


def differ(a, b):
    return [name for name in a if not torch.equal(a[name], b[name])]


# --- one optimizer step of a synced worker


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, 1.0)


def learner_with(optim, clip=None):
    return Learner(OneLayer(), {'optim_spec': optim, 'lr_scheduler_spec': None, 'clip_grad_val': clip})


def test_a_step_of_a_follower_is_one_of_the_global_weights_which_it_then_has_too():
    learner, theirs = learner_with({'name': 'SGD', 'lr': 0.5}), torch.tensor([[3.0, -1.0]])
    learner.follow([theirs])
    # the gradient is that of its own weights, (2, 4) here: 3 - 0.5 * 2 = 2 and -1 - 0.5 * 4 = -3
    learner.step((learner.net.layer.weight * torch.tensor([[2.0, 4.0]])).sum())
    assert theirs.tolist() == [[2.0, -3.0]]
    assert learner.net.layer.weight.tolist() == [[2.0, -3.0]]
    assert learner.net.layer.weight.data_ptr() != theirs.data_ptr()


def test_the_gradient_is_clipped_before_it_is_applied_to_the_global_weights():
    learner, theirs = learner_with({'name': 'SGD', 'lr': 1.0}, clip=1.0), torch.zeros(1, 2)
    learner.follow([theirs])
    learner.step((learner.net.layer.weight * torch.tensor([[3.0, 4.0]])).sum())  # of norm 5
    torch.testing.assert_close(theirs, torch.tensor([[-0.6, -0.8]]))


def test_a_loss_that_is_not_finite_leaves_the_global_weights():
    learner, theirs = learner_with({'name': 'SGD', 'lr': 1.0}), torch.tensor([[3.0, -1.0]])
    learner.follow([theirs])
    assert learner.step(learner.net.layer.weight.sum() * float('nan')) is None
    assert theirs.tolist() == [[3.0, -1.0]] and learner.net.layer.weight.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    'optim', [GLOBAL_ADAM, {'name': 'GlobalRMSprop', 'lr': 0.02}, {'name': 'Lookahead', 'optimizer': 'GlobalAdam'}]
)
def test_steps_of_a_follower_from_equal_weights_are_those_of_a_plain_learner(optim):
    plain, follower = learner_with(optim), learner_with(optim)
    theirs = torch.ones(1, 2)
    follower.follow([theirs])
    for step in range(7):  # Lookahead draws its slow weights near at the fifth
        for learner in (plain, follower):
            learner.step((learner.net.layer.weight**2 * torch.tensor([[1.0, step]])).sum())
        assert torch.equal(theirs, plain.net.layer.weight) and torch.equal(follower.net.layer.weight, theirs)


# --- what workers share


def test_what_an_optimizer_keeps_from_the_start_is_shared_and_what_it_allocates_later_is_not():
    def shared_state(optim):
        return {p.split('.')[-1] for p in hogwild.tensors_of(learner_with(optim)) if p.startswith('optim.')}

    assert shared_state(GLOBAL_ADAM) == {'step', 'exp_avg', 'exp_avg_sq'}
    assert shared_state({'name': 'GlobalRMSprop'}) == {'step', 'square_avg'}
    assert shared_state({'name': 'Adam'}) == set()
    lookahead = set(hogwild.tensors_of(learner_with({'name': 'Lookahead', 'optimizer': 'RAdam'})))
    assert lookahead == {'net.layer.weight', 'optim.lookahead.steps', 'optim.lookahead.slow.0'}


def test_a_worker_of_a_shared_run_trains_the_global_tensors_and_one_of_a_synced_run_has_its_own(tmp_path):
    for distributed, is_same in (('shared', True), ('synced', False)):
        specs = specs_of(tmp_path, hogwild_spec(distributed))
        shared = hogwild.build(specs, False, load_net)
        assert all(t.is_shared() for places in shared.values() for t in places.values())
        one, other = (build_worker(spec, shared) for spec in specs)
        assert one.clock.max_frame == int(303 / 2)
        before = weights(one.agent.algorithm.learners['net'])
        assert not differ(before, weights(other.agent.algorithm.learners['net']))
        one.store = False
        one.run()
        mine = one.agent.algorithm.learners['net']
        theirs = {name: shared['net'][f'net.{name}'] for name in before}
        assert differ(before, theirs) and not differ(weights(mine), theirs)
        for name, p in mine.net.named_parameters():
            assert (p.data_ptr() == theirs[name].data_ptr()) is is_same
        # the other has them too where they are shared, and as they were where it has not taken a step yet
        assert bool(differ(weights(other.agent.algorithm.learners['net']), theirs)) is not is_same
        moments = [k for k in shared['net'] if k.endswith('exp_avg')]
        assert moments and all(shared['net'][k].any() for k in moments if 'weight' not in k)
        steps = other.agent.algorithm.learners['net'].optim.state_dict()['state'][0]['step']
        assert steps > 0, 'the state of GlobalAdam is not shared'


def test_the_nets_of_a_shared_run_stand_still_while_they_are_saved(tmp_path, monkeypatch):
    """Another worker trains on meanwhile: a file must not change between its writing and its checksum."""
    spec = specs_of(tmp_path, hogwild_spec('shared'))[0]
    shared = hogwild.build([spec], False, load_net)
    worker = build_worker(spec, shared)
    before = weights(worker.agent.algorithm.learners['net'])
    save = CheckpointStore.save

    def save_amid_training(store, tree, **kwargs):
        for tensor in shared['net'].values():
            tensor.add_(1)
        return save(store, tree, **kwargs)

    monkeypatch.setattr(CheckpointStore, 'save', save_amid_training)
    worker.env.reset()
    worker.save()
    found = worker.store.find()
    saved = worker.store.restore(found.generation, worker.state_dict())['agent']['algorithm']['nets']['net']
    assert not differ(saved, before)
    after = weights(worker.agent.algorithm.learners['net'])
    assert all(torch.equal(after[name], before[name] + 1) for name in before)


def test_target_nets_are_each_workers_own_and_start_as_the_global_net(tmp_path):
    raw = raw_spec('DQN', meta={'distributed': 'shared', 'max_session': 2})
    specs = specs_of(tmp_path, raw)
    shared = hogwild.build(specs, False, load_net)
    targets = [build_worker(spec, shared).agent.algorithm.targets['target_net'].target for spec in specs]
    for target in targets:
        assert not differ(target.state_dict(), {k: shared['net'][f'net.{k}'] for k in target.state_dict()})
    first, second = (next(target.parameters()) for target in targets)
    assert first.data_ptr() != second.data_ptr() and not first.is_shared()


def test_too_little_shared_memory_is_said(tmp_path, monkeypatch):
    usage = hogwild.shutil.disk_usage('/')._replace(free=10)
    monkeypatch.setattr(hogwild.shutil, 'disk_usage', lambda path: usage)
    monkeypatch.setattr(hogwild, 'SHARED_MEMORY', tmp_path)
    with pytest.raises(MachineError, match='shared memory'):
        hogwild.build(specs_of(tmp_path, hogwild_spec()), False, load_net)


def _add_one(tensors):
    for tensor in tensors.values():
        tensor.add_(1)


def test_another_process_changes_the_same_tensors(tmp_path):
    shared = hogwild.build(specs_of(tmp_path, hogwild_spec('shared')), False, load_net)
    before = {k: t.clone() for k, t in shared['net'].items()}
    process = multiprocessing.get_context('fork').Process(target=_add_one, args=(shared['net'],))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert all(torch.equal(shared['net'][k], before[k] + 1) for k in before)


# --- whole runs


def write_spec(lab, distributed, max_frame=1500, num_sessions=2):
    raw = hogwild_spec(distributed, env={'max_frame': max_frame}, max_session=num_sessions)
    raw['meta']['log_frequency'] = 100
    lab.spec_file.write_text(json.dumps({lab_process.SPEC_NAME: raw}))


def saved_state(lab, session):
    """The newest checkpoint's state tree."""
    store = lab.store(session)
    return torch.load(store.folder / store.find().generation.manifest['state'], weights_only=True)


def shared_memory_files():
    return set(os.listdir('/dev/shm')) if os.path.isdir('/dev/shm') else set()


def test_a_run_of_one_worker_goes_through_a_process_too_and_has_all_frames(lab):
    write_spec(lab, 'synced', max_frame=200, num_sessions=1)
    life = lab.train()
    assert life.status == 0, life.output
    assert lab.frame(0) == 200 and lab.store(0).find().generation.final


@pytest.mark.parametrize('distributed', ['shared', 'synced'])
def test_a_run_that_is_killed_goes_on_from_the_newest_nets_and_each_workers_own_clock(lab, distributed):
    there = shared_memory_files()
    write_spec(lab, distributed, max_frame=40000)
    life = lab.start_train(spawned=distributed == 'shared')
    life.wait_for(lambda: (lab.frame(0) or 0) >= 300 and (lab.frame(1) or 0) >= 300)
    life.signal_group(signal.SIGKILL)
    life.wait()
    life.wait_for_no_process()
    assert not {name for name in shared_memory_files() - there if name.startswith('torch_')}
    frames = {session: lab.frame(session) for session in (0, 1)}
    for session in (0, 1):  # the optimizer has counted the steps of both
        state = saved_state(lab, session)
        own_steps = state['clock']['opt_step'] / 2  # of two nets
        assert state['agent']['algorithm']['optims']['net']['state'][0]['step'] > own_steps

    write_spec(lab, distributed, max_frame=2 * (max(frames.values()) + 400))
    life = lab.train('train@latest')
    assert life.status == 0, life.output
    for session in (0, 1):
        resumed = f'Resumed trial 0 session {session} from the checkpoint of frame {frames[session]}'
        assert resumed in lab.log(session) and 'exactness (Hogwild' in lab.log(session)
        assert lab.frame(session) == max(frames.values()) + 400 and lab.store(session).find().generation.final
    assert 'Global nets and optimizers: those of session' in life.output
    assert list((lab.run_folder / 'info').glob('*_t0_trial_metrics*'))

    with pytest.raises(ResumeError, match='distributed'):
        verify_run(lab.run_folder, StopRequest())
    life = lab.train('train@latest')
    assert '2 of 2 sessions have nothing left to train' in life.output, life.output
    write_spec(lab, distributed, max_frame=max(frames.values()) + 500)  # more than each has trained, but not for two
    life = lab.train('train@latest')
    assert life.status == 2 and 'leaves each of 2 workers' in life.output, life.output


def test_a_worker_that_dies_leaves_the_other_to_its_end_and_is_resumed_alone(lab):
    write_spec(lab, 'shared', max_frame=1000)
    dies = 'if args[0].index == 1 and args[0].clock.frame == 300: os.kill(os.getpid(), signal.SIGKILL)'
    life = lab.train(hooks=[('slm_lab.experiment.session', 'Session.save', 0, dies)])
    assert life.status == 1 and 'session 1: its process died (killed by signal 9)' in life.output, life.output
    assert (lab.frame(0), lab.frame(1)) == (500, 200)
    of_the_first = saved_state(lab, 0)['agent']['algorithm']['optims']['net']['state'][0]['step']
    life = lab.train('train@latest')
    assert life.status == 0 and '1 of 2 sessions have nothing left to train' in life.output, life.output
    assert lab_process.resumed_frames(life.output) == [200] and lab.frame(1) == 500
    assert saved_state(lab, 1)['agent']['algorithm']['optims']['net']['state'][0]['step'] > of_the_first


def test_a_signal_stops_all_workers_with_their_checkpoints(lab):
    write_spec(lab, 'synced', max_frame=100000)
    life = lab.start_train()
    life.wait_for(lambda: (lab.frame(0) or 0) >= 100 and (lab.frame(1) or 0) >= 100)
    life.signal(signal.SIGTERM)
    life.wait()
    assert life.status == 143 and 'complete checkpoints: session 0 at frame' in life.output, life.output
    assert lab.frame(0) < 50000 and lab.frame(1) < 50000


class StopAtFrame(StopRequest):
    def __init__(self, session, frame):
        super().__init__()
        self.session, self.frame = session, frame

    def __call__(self):
        return self.session.clock.frame >= self.frame


def test_the_global_nets_are_those_of_the_newest_checkpoint_and_a_workers_own_never_overwrite_them(tmp_path):
    raw = hogwild_spec('shared', env={'max_frame': 2000})
    specs = specs_of(tmp_path, raw)
    shared = hogwild.build(specs, False, load_net)
    saved = []
    for spec, frame in zip(specs, (120, 60), strict=True):  # the one that has trained less is the one saved last
        worker = build_worker(spec, shared)
        worker.stop = StopAtFrame(worker, frame)
        worker.run()
        path = worker.store.folder / f'{worker.store._stems()[0][1]}_manifest.json'
        saved.append((worker, path))
    newest = weights(saved[1][0].agent.algorithm.learners['net'])
    set_time(saved[0][1], '2030-01-01T10:00:00+0000')
    set_time(saved[1][1], '2030-01-01T10:00:01+0000')

    again = hogwild.build(specs, True, load_net)
    assert not differ(newest, {k: again['net'][f'net.{k}'] for k in newest})
    assert again['net']['optim.state.0.step'] > 0
    for spec, frame in zip(specs, (120, 60), strict=True):
        worker = hogwild.Worker(spec, 'train', StopRequest(), again)
        restored = resume.restore_session(worker)
        assert not restored.exact
        worker.join(True)
        assert worker.clock.frame == frame
        assert not differ(newest, weights(worker.agent.algorithm.learners['net']))


def worker_at(spec, shared, frame):
    worker = build_worker(spec, shared)
    worker.stop = StopAtFrame(worker, frame)
    worker.run()
    return worker


def test_a_folder_without_checkpoints_goes_on_from_the_nets_of_the_worker_that_came_furthest(tmp_path):
    """As SLM Lab v4.2 leaves it: rows, nets and optimizers of each."""
    raw = hogwild_spec('synced', env={'max_frame': 2000}, meta={'log_frequency': 20})
    specs = specs_of(tmp_path, raw)
    for spec in specs:
        spec_util.save(spec)
    shared = hogwild.build(specs, False, load_net)
    furthest = weights(worker_at(specs[0], shared, 120).agent.algorithm.learners['net'])
    worker_at(specs[1], shared, 60)
    shutil.rmtree(Path(specs[0]['meta']['predir']) / 'checkpoint')

    again = hogwild.build(specs, True, load_net)
    assert not differ(furthest, {k: again['net'][f'net.{k}'] for k in furthest})
    for spec, frame in zip(specs, (120, 60), strict=True):
        worker = hogwild.Worker(spec, 'train', StopRequest(), again)
        assert not resume.restore_session(worker).exact
        worker.join(True)
        assert worker.clock.frame == frame
        assert not differ(furthest, weights(worker.agent.algorithm.learners['net']))


@pytest.mark.parametrize('distributed', ['shared', 'synced'])
def test_load_net_gives_all_workers_the_nets_that_it_names(tmp_path, distributed):
    source = specs_of(tmp_path / 'source', hogwild_spec())[0]
    worker_at(source, hogwild.build([source], False, load_net), 120)
    raw = hogwild_spec(distributed)
    raw['agent'][0]['load_net'] = source['meta']['model_prepath']
    specs = specs_of(tmp_path / 'new', raw)
    shared = hogwild.build(specs, False, load_net)
    for name in ('net', 'critic_net'):
        saved = torch.load(f'{source["meta"]["model_prepath"]}_{name}_model.pt', weights_only=True)
        for spec in specs:
            worker = build_worker(spec, shared)
            assert not differ(saved, weights(worker.agent.algorithm.learners[name]))
            assert worker.clock.frame == 0


def set_time(path, time):
    from slm_lab.experiment.checkpoint import _checksum

    manifest = json.loads(path.read_text())
    manifest.pop('sha256')
    manifest['time'] = time
    path.write_text(json.dumps(manifest | {'sha256': _checksum(manifest)}))


# --- refusals


@pytest.mark.parametrize(
    ('raw', 'line'),
    [
        (hogwild_spec('synced', nets={'gpu': True}), "meta.distributed: 'synced' trains on the CPU"),
        (hogwild_spec('synced', nets={'gpu': 'auto'}), "meta.distributed: 'synced' trains on the CPU"),
        (hogwild_spec('shared', env={'max_frame': 1}), 'meta.distributed: 2 workers cannot divide 1 frames'),
        (hogwild_spec('shared', meta={'search_scheduler': {}}), 'meta.distributed: a search_scheduler'),
    ],
)
def test_specs_that_are_refused(raw, line):
    with pytest.raises(SpecError, match=line):
        spec_util.prepare({**raw, 'name': 'tiny'})


def test_a_shared_run_may_ask_for_a_gpu():
    assert spec_util.prepare({**hogwild_spec('shared', nets={'gpu': 'auto'}), 'name': 'tiny'})
