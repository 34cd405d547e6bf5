"""What a run reports of itself: the rows of its data frames and its best return."""

import math

import numpy as np
import pandas as pd

COLUMNS = (
    'epi',
    't',
    'wall_t',
    'opt_step',
    'frame',
    'fps',
    'total_reward',
    'total_reward_ma',
    'loss',
    'lr',
    'explore_var',
    'entropy_coef',
    'entropy',
    'grad_norm',
)
INT_COLUMNS = ('epi', 't', 'opt_step', 'frame')
MA_WINDOW = 100  # rows


class Body:
    """Collects rows at checkpoints; `train_df` and `eval_df` are built when they are read.

    Args:
        rigorous_eval: evaluation has rows of its own; else `eval_df` is `train_df`.
    """

    def __init__(self, rigorous_eval=False):
        self.rows = {'train': _empty_table()}
        if rigorous_eval:
            self.rows['eval'] = _empty_table()
        self.best_total_reward_ma = -math.inf
        self.total_reward_ma = math.nan
        self.loss = math.nan
        self.entropy = math.nan

    @property
    def rigorous_eval(self):
        return 'eval' in self.rows

    @property
    def train_df(self):
        return _data_frame(self.rows['train'])

    @property
    def eval_df(self):
        return _data_frame(self.rows['eval']) if self.rigorous_eval else self.train_df

    def add_row(self, df_mode, row):
        """Appends a row {column: value}; fills in `total_reward_ma`, the mean of the last 100 total_reward.

        Returns: the row.
        """
        table = self.rows[df_mode]
        recent = [*table['total_reward'][-MA_WINDOW + 1 :], row['total_reward']]
        finite = [r for r in recent if math.isfinite(r)]
        row['total_reward_ma'] = sum(finite) / len(finite) if finite else math.nan
        for column in COLUMNS:
            table[column].append(row[column])
        if df_mode == 'train':
            self.total_reward_ma = row['total_reward_ma']
        return row

    def take_best(self, df_mode):
        """Whether the last row is at least as good as any before; remembers it if so.

        Judged by the evaluation's returns where there is one, else by training's; never by a value that is not finite.
        """
        if df_mode != ('eval' if self.rigorous_eval else 'train'):
            return False
        value = self.rows[df_mode]['total_reward_ma'][-1]
        if not (math.isfinite(value) and value >= self.best_total_reward_ma):
            return False
        self.best_total_reward_ma = value
        return True

    def state_dict(self):
        return {
            'rows': {mode: {c: _column(c, values) for c, values in t.items()} for mode, t in self.rows.items()},
            'best_total_reward_ma': self.best_total_reward_ma,
            'total_reward_ma': self.total_reward_ma,
            'loss': self.loss,
            'entropy': self.entropy,
        }

    def load_state_dict(self, state):
        for mode, table in state['rows'].items():
            self.rows[mode] = {c: list(_column(c, table[c]).tolist()) for c in COLUMNS}
        for name in ('best_total_reward_ma', 'total_reward_ma', 'loss', 'entropy'):
            setattr(self, name, state[name])

    def load_data_frames(self, train_df, eval_df=None):
        """Takes over data frames of a run of which no checkpoint was kept, and recovers the best from them."""
        frames = {'train': train_df, **({'eval': eval_df} if self.rigorous_eval and eval_df is not None else {})}
        for mode, df in frames.items():
            absent = [math.nan] * len(df)
            self.rows[mode] = {c: _column(c, df.get(c, absent)).tolist() for c in COLUMNS}
        self.total_reward_ma = self.rows['train']['total_reward_ma'][-1] if len(train_df) else math.nan
        judged = self.rows['eval' if 'eval' in frames else 'train']['total_reward_ma']
        self.best_total_reward_ma = max((v for v in judged if math.isfinite(v)), default=-math.inf)


def _empty_table():
    return {column: [] for column in COLUMNS}


def _column(name, values):
    values = np.asarray(values, dtype=np.float64 if name not in INT_COLUMNS else None)
    if name in INT_COLUMNS:
        values = np.nan_to_num(values.astype(np.float64)).astype(np.int64) if values.dtype.kind == 'f' else values
        values = values.astype(np.int64)
    return values


def _data_frame(table):
    return pd.DataFrame({c: _column(c, values) for c, values in table.items()}, columns=list(COLUMNS))
