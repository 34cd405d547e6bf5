"""kill -9 at any moment costs the frames since the last checkpoint, and nothing else."""

import pytest
from kill_many import kill_many
from lab_process import assert_same_end, leftovers, undisturbed

KILL = 'os.kill(os.getpid(), signal.SIGKILL)'


@pytest.mark.parametrize(
    ('num_kills', 'seed', 'num_sessions'),
    [
        (10, 1, 1),
        pytest.param(100, 2, 1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param(30, 3, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_the_undisturbed_one(tmp_path, num_kills, seed, num_sessions):
    kills = kill_many(tmp_path, num_kills, seed, num_sessions)
    assert len(kills) == num_kills
    assert {moment for moment, _ in kills} == {'import', 'loop', 'file', 'end'}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_game_whose_memory_is_full_is_killed_again_and_again(tmp_path):
    pytest.importorskip('ale_py')
    assert len(kill_many(tmp_path, 20, seed=4, game='ALE/Breakout-v5')) == 20


@pytest.fixture
def lab(lab):
    lab.write_spec(max_frame=300)
    return lab


@pytest.mark.parametrize(
    ('module', 'function', 'call'),
    [
        ('slm_lab.experiment.checkpoint', 'CheckpointStore.prune', 1),
        ('slm_lab.experiment.model_files', 'publish_models', 1),
        ('slm_lab.experiment.model_files', 'publish_data_frames', 1),
        ('os', 'replace', 1),  # the first of the nets' files
        ('os', 'replace', 4),  # of a net, a target net, an optimizer and two data frames
        ('os', 'replace', 5),
        ('slm_lab.experiment.analysis', 'analyze_session', 1),
        ('slm_lab.experiment.analysis', 'analyze_trial', 1),
    ],
)
def test_killed_between_the_final_checkpoint_and_the_files_for_reading(lab, module, function, call):
    """The final checkpoint is there, the classic files or metrics still tell of an earlier frame, or are half new."""
    code = f"""
import glob
if glob.glob(FOLDER + '/data/*/checkpoint/*/*_300_manifest.json'):
    number = next(n for n in range(1, 100) if mark(f'call {{n}}'))
    number == {call} and {KILL}
"""
    life = lab.train(hooks=[(module, function, 0, code)])
    assert life.status == -9
    assert lab.frame() == 300
    assert lab.train('train@latest').status == 0
    assert_same_end(lab.run_folder, undisturbed(max_frame=300)[0])


def test_what_a_killed_process_was_writing_is_swept_away(lab):
    hooks = [('os', 'replace', 30, KILL)]
    assert lab.train(hooks=hooks).status == -9
    assert len(leftovers(lab.run_folder)) == 1
    assert lab.train('train@latest').status == 0
    assert leftovers(lab.run_folder) == []
    assert_same_end(lab.run_folder, undisturbed(max_frame=300)[0])
