import json
import time

import numpy as np

from slm_lab.env import Clock

GOES_ON, ENDS = np.array([False]), np.array([True])


def counters(clock):
    return clock.frame, clock.t, clock.epi, clock.opt_step


def test_one_slot_counts_t_within_the_episode():
    clock = Clock(max_frame=1e4)
    seen = []
    for ended in (GOES_ON, GOES_ON, ENDS, GOES_ON):
        clock.tick_step(ended)
        seen.append(counters(clock))
    assert seen == [(1, 1, 0, 0), (2, 2, 0, 0), (3, 0, 1, 0), (4, 1, 1, 0)]


def test_several_slots_count_frames_of_all_and_t_is_the_frame():
    clock = Clock(max_frame=100, num_envs=3)
    clock.tick_step(np.array([False, True, False]))
    assert counters(clock) == (3, 3, 1, 0)
    clock.tick_step(np.array([True, True, False]))
    assert counters(clock) == (6, 6, 3, 0)


def test_opt_step_counts_by_one():
    clock = Clock(max_frame=100, num_envs=4)
    clock.tick_opt_step()
    clock.tick_opt_step()
    assert clock.opt_step == 2


def test_max_frame_is_an_int_and_so_is_every_counter():
    clock = Clock(max_frame=1e7)
    clock.tick_step(ENDS)
    assert type(clock.max_frame) is int and clock.max_frame == 10_000_000
    assert all(type(value) is int for value in counters(clock))


def test_new_episode_counts_the_lost_one():
    clock = Clock(max_frame=100)
    clock.tick_step(GOES_ON)
    clock.new_episode()
    assert counters(clock) == (1, 0, 1, 0)
    several = Clock(max_frame=100, num_envs=2)
    several.tick_step(np.array([False, False]))
    several.new_episode()
    assert counters(several) == (2, 2, 1, 0)


def test_state_is_exact_above_the_integers_of_float32():
    clock = Clock(max_frame=100)
    clock.frame, clock.t, clock.epi, clock.opt_step = 2**24 + 1, 5, 7, 2**53 + 1
    later = Clock(max_frame=100)
    later.load_state_dict(json.loads(json.dumps(clock.state_dict())))
    assert counters(later) == (2**24 + 1, 5, 7, 2**53 + 1)


def test_wall_t_sums_over_runs():
    clock = Clock(max_frame=100)
    time.sleep(0.02)
    state = clock.state_dict()
    assert 0.02 <= state['wall_t'] < 10
    later = Clock(max_frame=100)
    later.load_state_dict({**state, 'wall_t': 3600.0})
    assert 3600.0 <= later.wall_t < 3610.0
