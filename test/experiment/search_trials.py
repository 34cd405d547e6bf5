"""Trials of a search that take no time: stand-ins for `experiment.run_trial`, run by name in processes of their own.

Nothing here imports torch, so that such a process starts at once.
"""

import os
import time


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
