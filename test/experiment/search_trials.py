"""Trials of a search that take no time: stand-ins for `experiment.run_trial`, run by name in processes of their own.

Nothing here imports torch, so that such a process starts at once.
"""

import os
import signal
import time

from slm_lab.experiment import search_worker

FOLDER = os.path.dirname(os.path.abspath(__file__))  # must be on the path of a process that runs them


def run_without_ray(queue, num_trials, stop, asha=None, seed=0):
    """Stands in for `search.run`: one trial after another, in this process."""
    while not stop():
        try:
            job = queue.next()
        except StopIteration:
            return
        search_worker.run_job(job.details, stop)
        queue.ended(job.trial, None)


def finish(spec, index, stop):
    """Ends well, as strong as its gamma."""
    return {'status': 'finished', 'frame': 100, 'metrics': {'strength': spec['agent'][0]['algorithm']['gamma']}}


def fail(spec, index, stop):
    """The second trial crashes."""
    if index == 1:
        raise RuntimeError('boom')
    return finish(spec, index, stop)


def climb(spec, index, stop):
    """Tells of a row every 100 frames up to frame 1600, each as good as its gamma; some crash, and some die."""
    gamma = spec['agent'][0]['algorithm']['gamma']
    if gamma == 0.6:
        raise RuntimeError('boom')
    if gamma == 0.7:
        os._exit(7)
    for frame in range(100, 1600, 100):
        stop.row_logged({'frame': frame, 'total_reward_ma': gamma})
        if stop.given_up:
            return {'status': 'stopped by the scheduler', 'frame': frame, 'metrics': {'strength': gamma}}
        if stop():
            return None
    return {'status': 'finished', 'frame': 1600, 'metrics': {'strength': gamma}}


def wait(spec, index, stop):
    """Goes on until it is asked to stop."""
    while not stop():
        time.sleep(0.01)


def climb_on_disk(spec, index, stop):
    """As `climb`, with its rows on disk, from the last of which it goes on. KILL_AT, e.g. `2 200 told`, says when it
    kills the search: with the row of frame 200 of trial 2 on disk, told of or not."""
    path, gamma = f'{spec["meta"]["info_prepath"]}_s0_session_df_train.csv', spec['agent'][0]['algorithm']['gamma']
    frame, kill_at = last_frame(path), os.environ.get('KILL_AT')
    with open(path, 'a') as f:
        if frame == 0:
            f.write('frame,total_reward_ma\n')
        while frame < 1600 and not stop():
            frame += 100
            f.write(f'{frame},{gamma}\n')
            f.flush()
            for moment in ('untold', 'told'):
                if kill_at == f'{index} {frame} {moment}':
                    os.kill(int(os.environ['SEARCH_PID']), signal.SIGKILL)
                    wait(spec, index, stop)
                elif moment == 'untold' and frame < 1600:
                    stop.row_logged({'frame': frame, 'total_reward_ma': gamma})
    if stop.given_up:
        return {'status': 'stopped by the scheduler', 'frame': frame, 'metrics': {'strength': gamma}}
    return {'status': 'finished', 'frame': 1600, 'metrics': {'strength': gamma}} if frame == 1600 else None


def last_frame(path):
    """The frame of the last of `climb_on_disk`'s rows; 0 where there is none."""
    if not os.path.exists(path):
        return 0
    with open(path) as f:
        return int(f.readlines()[-1].partition(',')[0])


def finish_or_kill(spec, index, stop):
    """As `finish`; KILL_AT is the trial in which it kills the search, in whose process it runs."""
    if os.environ.get('KILL_AT') == str(index):
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(spec, index, stop)
