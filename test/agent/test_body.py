"""The rows of a run, its moving average, and its best return."""

import math

import numpy as np
import pandas as pd
import pytest

from slm_lab.agent.body import COLUMNS, INT_COLUMNS, Body
from slm_lab.lib.files import read_csv
from slm_lab.lib.state import check_tree, first_difference, snapshot

NAN = math.nan


def row(total_reward, frame=0, **values):
    return dict.fromkeys(COLUMNS, 0) | {'frame': frame, 'total_reward': total_reward, **values}


def filled(returns, df_mode='train', **keys):
    body = Body(**keys)
    for frame, total_reward in enumerate(returns):
        body.add_row(df_mode, row(total_reward, frame, loss=frame / 3))
    return body


def test_rows_become_a_data_frame_with_the_classic_columns():
    df = filled([1.0, 2.0]).train_df
    assert ','.join(df.columns) == (
        'epi,t,wall_t,opt_step,frame,fps,total_reward,total_reward_ma,loss,lr,explore_var,entropy_coef,entropy,grad_norm'
    )
    assert df['total_reward'].tolist() == [1.0, 2.0] and df['frame'].tolist() == [0, 1]
    assert {column: str(dtype) for column, dtype in df.dtypes.items()} == {
        column: 'int64' if column in ('epi', 't', 'opt_step', 'frame') else 'float64' for column in df.columns
    }
    assert Body().train_df.empty and list(Body().train_df.columns) == list(df.columns)


def test_the_average_is_over_the_last_hundred_rows_and_skips_nan():
    returns = [NAN, NAN, *(float(i) for i in range(150)), NAN, math.inf]
    expected = pd.Series([r if math.isfinite(r) else NAN for r in returns]).rolling(100, min_periods=1).mean()
    body = filled(returns)
    assert body.train_df['total_reward_ma'].tolist() == pytest.approx(expected.tolist(), nan_ok=True)
    assert math.isnan(body.train_df['total_reward_ma'][1])
    assert body.train_df['total_reward_ma'].iloc[-1] == pytest.approx(np.mean(range(52, 150)))  # 98 returns
    assert body.total_reward_ma == body.train_df['total_reward_ma'].iloc[-1]


def test_counters_are_exact_where_float32_is_not():
    n = 2**24 + 1
    body = Body()
    body.add_row('train', row(1.0, n, epi=2**53 + 1, opt_step=n, t=n))
    fresh = Body()
    fresh.load_state_dict(snapshot(body.state_dict()))
    for df in (body.train_df, fresh.train_df):
        assert df.loc[0, ['epi', 't', 'opt_step', 'frame']].tolist() == [2**53 + 1, n, n, n]


# --- best


def test_best_is_the_newest_of_the_largest_averages():
    body, best = Body(), []
    for total_reward in (NAN, 1.0, 1.0, 0.0, 4.0):  # averages NaN, 1, 1, 2/3, 1.5
        body.add_row('train', row(total_reward))
        best.append(body.take_best('train'))
    assert best == [False, True, True, False, True]
    assert body.best_total_reward_ma == 1.5


def test_best_is_judged_by_evaluation_where_there_is_one():
    body = Body(rigorous_eval=True)
    body.add_row('train', row(100.0))
    assert not body.take_best('train') and body.best_total_reward_ma == -math.inf
    body.add_row('eval', row(3.0))
    assert body.take_best('eval') and body.best_total_reward_ma == 3.0
    plain = filled([5.0])
    assert not plain.take_best('eval') and plain.take_best('train')


def test_eval_df_is_its_own_only_with_rigorous_eval():
    body = filled([1.0, 2.0])
    assert body.eval_df.equals(body.train_df) and not body.rigorous_eval
    both = filled([1.0, 2.0], rigorous_eval=True)
    assert both.rigorous_eval and both.eval_df.empty
    both.add_row('eval', row(9.0))
    assert both.eval_df['total_reward'].tolist() == [9.0] and len(both.train_df) == 2
    assert both.total_reward_ma == 1.5  # training's


# --- state


@pytest.mark.parametrize('rigorous_eval', [False, True])
def test_a_body_goes_on_from_its_state(rigorous_eval):
    returns = [NAN, 1 / 3, 0.1, 5.0, NAN, 2.0]

    def run(body, part):
        for total_reward in part:
            for mode in ('train', 'eval') if rigorous_eval else ('train',):
                body.add_row(mode, row(total_reward))
                body.take_best(mode)
            body.loss = total_reward
        return body

    whole = run(Body(rigorous_eval), returns * 30)
    half, other = run(Body(rigorous_eval), returns * 15), Body(rigorous_eval)
    state = snapshot(half.state_dict())
    check_tree(state)
    run(half, returns)
    run(other, [3.0])  # is overwritten
    other.load_state_dict(state)
    run(other, returns * 15)
    assert first_difference(other.state_dict(), whole.state_dict()) is None
    assert other.train_df.equals(whole.train_df) and other.eval_df.equals(whole.eval_df)


# --- data frames of runs without a checkpoint

OLD_CSV = """\
epi,t,wall_t,opt_step,frame,fps,total_reward,total_reward_ma,loss,lr,explore_var,entropy_coef,entropy,grad_norm
0.0,0.0,0.0,0.0,0.0,0.0,,,,0.02,1.0,,,
,12.0,3.0,640.0,500.0,166.66667,20.0,20.0,1.5,0.02,0.5,,,
31.0,7.0,6.0,16777216.0,1000.0,166.66667,10.0,15.0,2.5,0.018,0.1,,,
"""


def test_the_data_frame_of_an_old_run_is_taken_over(tmp_path):
    (tmp_path / 'old.csv').write_text(OLD_CSV)
    body = Body()
    body.load_data_frames(read_csv(tmp_path / 'old.csv'))
    df = body.train_df
    assert df['epi'].tolist() == [0, 0, 31] and df['opt_step'].tolist() == [0, 640, 2**24]
    assert df['frame'].dtype == np.int64 and df['frame'].tolist() == [0, 500, 1000]
    assert df['total_reward'].tolist()[1:] == [20.0, 10.0] and math.isnan(df['total_reward'][0])
    assert body.total_reward_ma == 15.0 and body.best_total_reward_ma == 20.0
    body.add_row('train', row(30.0, 1500))
    assert body.train_df['total_reward_ma'].tolist()[-1] == 20.0  # of 20, 10 and 30


def test_columns_that_are_missing_are_nan_or_0():
    body = Body()
    body.load_data_frames(pd.DataFrame({'frame': [0, 10], 'total_reward': [1.0, 2.0], 'extra': [1, 1]}))
    df = body.train_df
    assert list(df.columns) == list(COLUMNS)
    assert df['frame'].tolist() == [0, 10] and df['total_reward'].tolist() == [1.0, 2.0]
    missing = [c for c in COLUMNS if c not in ('frame', 'total_reward')]
    assert all((df[c] == 0).all() if c in INT_COLUMNS else df[c].isna().all() for c in missing)
    assert body.best_total_reward_ma == -math.inf


def test_evaluation_is_taken_over_where_it_has_rows_of_its_own():
    train, evaluated = filled([50.0]).train_df, filled([7.0, 3.0]).train_df
    body = Body(rigorous_eval=True)
    body.load_data_frames(train, evaluated)
    assert body.eval_df.equals(evaluated) and body.best_total_reward_ma == 7.0
    plain = Body()
    plain.load_data_frames(train, evaluated)
    assert plain.eval_df.equals(train) and plain.best_total_reward_ma == 50.0


def test_an_empty_data_frame_is_no_best():
    body = Body()
    body.load_data_frames(pd.DataFrame(columns=list(COLUMNS)))
    assert body.train_df.empty and body.best_total_reward_ma == -math.inf and math.isnan(body.total_reward_ma)
