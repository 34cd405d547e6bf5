"""Damaged checkpoints: the one before is used and the run still ends the same, or it is refused; never in silence."""

import re
import shutil

import pandas as pd
import pytest
from lab_process import SPEC_NAME, Lab, assert_same_end, fork_server, hashes, undisturbed

STOP = 'os.kill(os.getpid(), signal.SIGTERM)'
DAMAGES = ('truncated', 'zeroed', 'one bit flipped', 'deleted')


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == 'deleted':
        path.unlink()
    elif how == 'truncated':
        path.write_bytes(content[: len(content) // 2])
    elif how == 'zeroed':
        path.write_bytes(bytes(len(content)))
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.fixture(scope='module')
def stopped_labs(tmp_path_factory):
    """{frame: Lab of a run stopped there}: at 100, where the newest checkpoint holds new best nets, and at 351."""
    labs = {}
    for frame, hook in {
        100: ('slm_lab.experiment.checkpoint', 'CheckpointStore._write_manifest', 2, STOP),
        351: ('slm_lab.agent.agent', 'Agent.update', 351, STOP),
    }.items():
        labs[frame] = lab = Lab(tmp_path_factory.mktemp('stopped') / 'lab', fork_server())
        lab.write_spec()
        assert lab.train(hooks=[hook]).status == 143
        assert lab.frame() == frame
    return labs


@pytest.fixture
def copy_of_stopped(stopped_labs, tmp_path):
    def copy(frame):
        shutil.copytree(stopped_labs[frame].folder, tmp_path / 'lab')
        lab = Lab(tmp_path / 'lab', fork_server())
        lab._lives = 100
        return lab

    return copy


def files_of(store, kind):
    """The files of a kind, e.g. `state.pt` or `manifest.json`, newest first."""
    return sorted(store.folder.glob(f'*_{kind}'), reverse=True)


@pytest.mark.parametrize('how', DAMAGES)
@pytest.mark.parametrize(
    ('frame', 'kind', 'previous'),
    [(100, 'best.pt', 0), (351, 'manifest.json', 300), (351, 'state.pt', 300), (351, 'ring0.seg', 300)],
)
def test_a_damaged_file_costs_one_checkpoint_and_the_end_is_the_same(copy_of_stopped, frame, kind, previous, how):
    lab = copy_of_stopped(frame)
    file = files_of(lab.store(), kind)[0]
    assert f'_{frame}_' in file.name
    damage(file, how)
    life = lab.train('train@latest')
    assert life.status == 0, life.output
    assert re.search(
        rf'WARNING .*/{re.escape(file.name)} .*: the checkpoint of frame {frame} is incomplete', life.output
    )
    assert f'Resumed trial 0 session 0 from the checkpoint of frame {previous}\n' in life.output
    assert re.search(r'missing: nothing', life.output)
    assert_same_end(lab.run_folder, undisturbed()[0])


def kept(lab):
    """All that a refusal must leave as it was: everything but the log and the empty lock."""
    return {name: h for name, h in hashes(lab.run_folder).items() if name != 'lock' and not name.startswith('log/')}


@pytest.mark.parametrize('kind', ['state.pt', 'manifest.json'])
def test_with_no_checkpoint_whole_and_no_nets_it_is_refused_and_nothing_changes(copy_of_stopped, kind):
    lab = copy_of_stopped(351)
    for file in files_of(lab.store(), kind):
        damage(file, 'truncated')
    shutil.rmtree(lab.run_folder / 'model')
    for file in (lab.run_folder / 'info').glob('*_df_*'):
        file.unlink()
    lab.write_spec(max_frame=700)
    before = kept(lab)
    life = lab.train('train@latest')
    assert life.status == 2
    assert 'Traceback' not in life.output
    assert re.search(r'^error: .*no checkpoint is whole, and there are no nets', life.output, re.MULTILINE)
    assert kept(lab) == before


@pytest.mark.parametrize('how', DAMAGES)
def test_without_its_memory_a_run_says_so_and_trains_only_when_the_warm_up_is_over(lab, how):
    """Stopped at 351 after training since 101; the memory that it fills anew holds 100 transitions at frame 451."""
    lab.write_spec(log_frequency=10)
    assert lab.train(hooks=[('slm_lab.agent.agent', 'Agent.update', 351, STOP)]).status == 143
    for file in files_of(lab.store(), 'ring0.seg'):
        damage(file, how)
    life = lab.train('train@latest')
    assert life.status == 0, life.output
    assert re.search(r'memory 0 \(of ', life.output)
    assert re.search(r'missing: agent\.memory\S* \(damaged: it fills anew, and training waits for it\)', life.output)
    rows = lab.run_folder / 'info' / f'{SPEC_NAME}_t0_s0_session_df_train.csv'
    opt_steps = pd.read_csv(rows).set_index('frame')['opt_step']
    at_stop = 2 * len(range(101, 351, 4))  # two steps every four frames from 101 on
    assert opt_steps[350] == at_stop
    assert (opt_steps[360:450] == at_stop).all()
    assert opt_steps[460] > at_stop
