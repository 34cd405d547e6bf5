"""Signals at every moment of a run: a complete checkpoint where it stopped, the command that resumes, the same end."""

import signal
import time

import pytest
from lab_process import (
    SPEC_NAME,
    assert_same_end,
    leftovers,
    resume_command,
    resumed_frames,
    undisturbed,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SPEC = {'rigorous_eval': 2}

# One run is stopped at each of these in turn: (moment, module, function that is entered just then, how many calls of
# it after the resume, frame at which the run then stops). The signal comes before the call.
MOMENTS = [
    ('first evaluation', 'slm_lab.experiment.session', 'Session.evaluate', 0, 0),
    ('start', 'slm_lab.spec.spec_util', 'get', 1, 0),
    ('building', 'slm_lab.experiment.session', 'Session.__init__', 1, 0),
    ('warm-up', 'slm_lab.agent.agent', 'Agent.update', 51, 51),
    ('acting', 'slm_lab.env.vector', 'VectorEnv.step', 0, 52),
    ('saving', 'slm_lab.experiment.checkpoint', 'CheckpointStore._write_manifest', 1, 100),
    ('between checkpoints', 'slm_lab.agent.agent', 'Agent.update', 51, 151),
    ('training', 'slm_lab.agent.net.optim', 'Learner.step', 9, 169),  # two steps each at 153, 157, 161, 165 and 169
    ('evaluation', 'slm_lab.experiment.session', 'Session.evaluate', 1, 200),
    ('writing classic files', 'slm_lab.experiment.model_files', 'publish_data_frames', 2, 300),  # the first is at 200
    ('last evaluation', 'slm_lab.experiment.session', 'Session.finish', 1, 600),
    ('plotting a session', 'slm_lab.experiment.analysis', 'draw_session', 1, 600),
    ('plotting the trial', 'slm_lab.experiment.analysis', 'draw_trial', 1, 600),
]


@pytest.mark.parametrize('number', SIGNALS, ids=lambda n: n.name)
def test_one_run_stopped_at_every_moment_ends_as_the_undisturbed_one(lab, number):
    lab.write_spec(**SPEC)
    args = [lab.spec_file, SPEC_NAME, 'train']
    stopped_at = None
    for moment, module, function, call, frame in MOMENTS:
        hook = (module, function, call, f'mark({moment!r}) and os.kill(os.getpid(), {int(number)})')
        life = lab.run(*args, hooks=[hook])
        assert lab.has_mark(moment), moment
        assert life.status == 128 + number, (moment, life.output)
        assert 'Traceback' not in life.output
        assert f'Stopped by {number.name}' in life.output
        assert lab.frame() == frame, moment
        if stopped_at is not None and stopped_at < 600:
            assert resumed_frames(life.output) == [stopped_at], moment
        stopped_at = frame
        _, args = resume_command(life.output)
    life = lab.run(*args)
    assert life.status == 0, life.output
    assert_same_end(lab.run_folder, undisturbed(**SPEC)[0])
    assert leftovers(lab.run_folder) == []


def test_a_signal_while_the_lab_is_still_being_imported(lab):
    """A process of its own, since the others have imported it already."""
    lab.write_spec()
    hooks = [('torch', '', 1, "mark('importing') and os.kill(os.getpid(), signal.SIGINT)")]
    life = lab.start_train(hooks=hooks, fresh=True).wait()
    assert lab.has_mark('importing')
    assert life.status == 130
    assert 'Traceback' not in life.output
    assert 'Stopped by SIGINT; complete checkpoints: session 0 at frame 0' in life.output
    assert lab.run(*resume_command(life.output)[1]).status == 0
    assert_same_end(lab.run_folder, undisturbed()[0])


def test_a_time_limit_leaves_a_checkpoint_of_the_moment(lab):
    """The limit passes at frame 251, between two checkpoints."""
    lab.write_spec()
    code = 'import slm_lab.experiment.stop as s; s.time = type("LateClock", (), {"time": lambda: 1e12})'
    life = lab.train_with('--stop-after', '5h50m', hooks=[('slm_lab.agent.agent', 'Agent.update', 251, code)])
    assert life.status == 0
    assert 'Stopped by the time limit; complete checkpoints: session 0 at frame 251' in life.output
    assert lab.frame() == 251
    assert lab.run(*resume_command(life.output)[1]).status == 0
    assert_same_end(lab.run_folder, undisturbed()[0])


# --- sessions side by side


def to_group(number, moment):
    """Code that sends a signal once to all processes of a run."""
    return f'in_session_process() and mark({moment!r}) and os.killpg(os.getpgrp(), {int(number)})'


def group_moments(first, second, third):
    """[(moment, signal, hook)]"""
    return [
        ('importing', first, ('slm_lab.experiment.session', '', 1, to_group(first, 'importing'))),
        ('training', second, ('slm_lab.agent.agent', 'Agent.update', 151, to_group(second, 'training'))),
        ('plotting', third, ('slm_lab.experiment.analysis', 'draw_session', 1, to_group(third, 'plotting'))),
    ]


@pytest.mark.parametrize(
    ('num_sessions', 'order'),
    [
        (2, SIGNALS),
        pytest.param(2, SIGNALS[1:] + SIGNALS[:1], marks=pytest.mark.slow),
        pytest.param(2, SIGNALS[2:] + SIGNALS[:2], marks=pytest.mark.slow),
        pytest.param(4, SIGNALS, marks=pytest.mark.slow),
        pytest.param(4, SIGNALS[1:] + SIGNALS[:1], marks=pytest.mark.slow),
        pytest.param(4, SIGNALS[2:] + SIGNALS[:2], marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_group_stops_all_sessions(lab, num_sessions, order):
    spec = {'max_session': num_sessions, 'num_cpus': 0.1, 'max_frame': 1500}
    lab.write_spec(**spec)
    args = [lab.spec_file, SPEC_NAME, 'train']
    for moment, number, hook in group_moments(*order):
        before = [lab.frame(i) or 0 for i in range(num_sessions)] if moment != 'importing' else [0] * num_sessions
        life = lab.run(*args, hooks=[hook], spawned=True)
        assert lab.has_mark(moment)
        assert life.status == 128 + number, (moment, life.output)
        assert 'Traceback' not in life.output
        assert f'Stopped by {number.name}' in life.output
        life.wait_for_no_process()
        frames = [lab.frame(i) for i in range(num_sessions)]
        for i, frame in enumerate(frames):
            assert f'session {i} at frame {frame}' in life.output or moment == 'plotting'
        if moment == 'importing':
            assert frames == before
        elif moment == 'training':
            # Ctrl-C reaches the sessions by way of their parent, a moment later
            assert max(frames) >= 151 if number == signal.SIGINT else 151 in frames
        assert all(now >= was for now, was in zip(frames, before, strict=True))
        _, args = resume_command(life.output)
    life = lab.run(*args)
    assert life.status == 0, life.output
    for i, end in enumerate(undisturbed(**spec)):
        assert_same_end(lab.run_folder, end, session=i)


def test_a_second_ctrl_c_leaves_at_once_with_a_complete_checkpoint_and_no_child(lab):
    """Both sessions hang in a save that Ctrl-C has asked for."""
    spec = {'max_session': 2, 'num_cpus': 0.1}
    lab.write_spec(**spec)
    hooks = [
        ('slm_lab.agent.agent', 'Agent.update', 151, to_group(signal.SIGINT, 'first')),
        (
            'slm_lab.experiment.checkpoint',
            'CheckpointStore._write_manifest',
            0,
            'os.path.exists(os.path.join(FOLDER, "first")) and (mark(f"hangs{os.getpid()}"), time.sleep(60))',
        ),
    ]
    life = lab.start_train(hooks=hooks)
    life.wait_for(lambda: list(lab.folder.glob('hangs*')))
    time.sleep(0.4)
    life.signal_group(signal.SIGINT)
    began = time.monotonic()
    assert life.wait(20).status == 130
    assert time.monotonic() - began < 5
    life.wait_for_no_process()
    assert lab.frame(0) % 100 == 0
    resumed = lab.train('train@latest')
    assert resumed.status == 0, resumed.output
    for i, end in enumerate(undisturbed(**spec)):
        assert_same_end(lab.run_folder, end, session=i)
    assert leftovers(lab.run_folder) == []


def test_sessions_whose_parent_was_killed_save_and_end_and_keep_others_out_until_then(lab):
    spec = {'max_session': 2, 'num_cpus': 0.1}
    lab.write_spec(**spec)
    lives = [
        ('slm_lab.agent.agent', 'Agent.update', 151, 'mark(f"alive{os.getpid()}")'),
        ('slm_lab.agent.agent', 'Agent.update', 0, 'time.sleep(0.01)'),
        (
            'slm_lab.experiment.checkpoint',
            'CheckpointStore._write_manifest',
            0,
            """
if int(args[1].split('_')[1]) % 100:
    mark(f'saving{os.getpid()}')
    while not os.path.exists(os.path.join(FOLDER, 'go')):
        time.sleep(0.01)
""",
        ),
    ]
    life = lab.start_train(hooks=lives, spawned=True)
    life.wait_for(lambda: len(list(lab.folder.glob('alive*'))) == 2)
    life.signal(signal.SIGKILL)
    life.wait()
    life.wait_for(lambda: len(list(lab.folder.glob('saving*'))) == 2, timeout=10)
    refused = lab.train('train@latest')
    assert refused.status == 2
    assert f'process {life.pid} has died' in refused.output
    (lab.folder / 'go').touch()
    life.wait_for_no_process()
    frames = [lab.frame(i) for i in range(2)]
    assert all(151 <= frame < 600 and frame % 100 for frame in frames)
    assert 'Traceback' not in life.output
    resumed = lab.train('train@latest')
    assert resumed.status == 0, resumed.output
    for i, end in enumerate(undisturbed(**spec)):
        assert f'from the checkpoint of frame {frames[i]}' in lab.log(i)
        assert_same_end(lab.run_folder, end, session=i)


def test_a_signal_to_one_session_alone_stops_the_trial(lab):
    lab.write_spec(max_session=2, num_cpus=0.1)
    code = 'in_session_process() and mark("one") and os.kill(os.getpid(), signal.SIGUSR1)'
    life = lab.train(hooks=[('slm_lab.agent.agent', 'Agent.update', 151, code)])
    assert life.status == 138
    assert 'Stopped by SIGUSR1' in life.output
    assert 151 in (lab.frame(0), lab.frame(1))


def test_graphs_are_redrawn_by_a_resume_when_drawing_them_was_cut_short(lab):
    """With real graphs: a signal to the group while the renderer works."""
    lab.write_spec(max_frame=200)
    hooks = [('slm_lab.lib.viz', '_Renderer.png', 3, "mark('drawing') and os.killpg(os.getpgrp(), signal.SIGINT)")]
    life = lab.train(hooks=hooks, graphs=True)
    assert lab.has_mark('drawing')
    assert life.status == 130
    assert 'when training was over; to have every graph, resume' in life.output
    assert 'Traceback' not in life.output
    life = lab.run(*resume_command(life.output)[1], graphs=True)
    assert life.status == 0, life.output
    graphs = lab.run_folder / 'graph'
    assert (graphs / f'{SPEC_NAME}_t0_s0_session_graph_eval_mean_returns_vs_frames.png').is_file()
    assert (graphs / f'{SPEC_NAME}_t0_trial_graph_mean_returns_vs_frames.png').is_file()
