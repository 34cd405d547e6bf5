"""Writes the table and the graphs of docs/benchmark.md from the run folders of a data folder:

    python bench/benchmark_table.py DATA_FOLDER

A run counts when its agent and env are those of the spec as shipped, and all of its 4 sessions came to max_frame; of
several, the newest. Specs without such a run keep their row and graph if they had one.
"""

import argparse
import re
import shutil
import statistics
from pathlib import Path

from slm_lab.lib import files

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / 'docs' / 'benchmark.md'
BEGIN, END = '<!-- by bench/benchmark_table.py -->\n', '<!-- end -->\n'
HEAD = '| env | frames | algorithm | published | here | sessions | command |\n|---|---|---|---|---|---|---|\n'
SESSIONS = 4

# algorithm, published return, spec file under benchmark/, spec name
SPECS = [
    ('REINFORCE', 483.31, 'reinforce/reinforce_cartpole.json', 'reinforce_cartpole_v1'),
    ('SARSA', 430.95, 'sarsa/sarsa_cartpole.json', 'sarsa_cartpole_v1'),
    ('VanillaDQN', None, 'dqn/dqn_classic.json', 'vanilla_dqn_cartpole_v1'),
    ('DQN', 239.94, 'dqn/dqn_classic.json', 'dqn_cartpole_v1'),
    ('DDQN+PER', 451.51, 'dqn/dqn_classic.json', 'ddqn_per_cartpole_v1'),
    ('A2C', 496.68, 'a2c/a2c_classic.json', 'a2c_cartpole_v1'),
    ('PPO', 498.94, 'ppo/ppo_classic.json', 'ppo_cartpole_v1'),
    ('SIL', None, 'sil/sil_cartpole.json', 'sil_cartpole_v1'),
    ('PPOSIL', None, 'sil/ppo_sil_cartpole.json', 'ppo_sil_cartpole_v1'),
    ('SAC', 406.09, 'sac/sac_classic.json', 'sac_cartpole'),
    ('CrossQ', 334.59, 'crossq/crossq_classic.json', 'crossq_cartpole'),
    ('DQN', -94.17, 'dqn/dqn_classic.json', 'dqn_acrobot'),
    ('DDQN+PER', -83.92, 'dqn/dqn_classic.json', 'ddqn_per_acrobot'),
    ('A2C', -83.99, 'a2c/a2c_classic.json', 'a2c_acrobot'),
    ('PPO', -81.28, 'ppo/ppo_classic.json', 'ppo_acrobot'),
    ('SAC', -92.60, 'sac/sac_classic.json', 'sac_acrobot'),
    ('CrossQ', -103.13, 'crossq/crossq_classic.json', 'crossq_acrobot'),
    ('A2C', -820.74, 'a2c/a2c_classic.json', 'a2c_pendulum'),
    ('PPO', -174.87, 'ppo/ppo_classic.json', 'ppo_pendulum'),
    ('SAC', -150.97, 'sac/sac_classic.json', 'sac_pendulum'),
    ('CrossQ', -145.66, 'crossq/crossq_classic.json', 'crossq_pendulum'),
    ('DQN', 195.21, 'dqn/dqn_box2d.json', 'dqn_lunar'),
    ('DDQN+PER', 265.90, 'dqn/dqn_box2d.json', 'ddqn_per_lunar'),
    ('A2C', 27.38, 'a2c/a2c_box2d.json', 'a2c_lunar'),
    ('PPO', 183.30, 'ppo/ppo_box2d.json', 'ppo_lunar_v3'),
    ('SAC', 106.17, 'sac/sac_box2d.json', 'sac_lunar_v3'),
    ('CrossQ', 139.21, 'crossq/crossq_box2d.json', 'crossq_lunar'),
]


def finished_run(data, name, spec):
    """(run folder, final total_reward_ma of each session) of the newest run of a spec that counts, or None."""
    for folder in sorted(data.glob(f'{name}_[0-9]*'), reverse=True):
        run = files.read_json(folder / f'{name}_spec.json')
        if any(run[part] != spec[part] for part in ('agent', 'env')):
            continue
        rows = [files.read_csv(path).iloc[-1] for path in folder.glob('info/*_session_df_train.csv')]
        if len(rows) == SESSIONS and all(row['frame'] >= spec['env'][0]['max_frame'] for row in rows):
            return folder, [float(row['total_reward_ma']) for row in rows]
    return None


def row_of(label, published, spec_file, name, spec, returns):
    env = spec['env'][0]
    beside = '–' if published is None else f'{published:.2f}'
    return (
        f'| {env["name"]} | {env["max_frame"]:,} | {label} | {beside} | {statistics.mean(returns):.2f} '
        f'| {min(returns):.1f} to {max(returns):.1f} | `python run_lab.py benchmark/{spec_file} {name} train` |\n'
    )


def old_rows(text):
    """{spec name: row}"""
    return {m[1]: m[0] for m in re.finditer(r'^\|.*run_lab\.py \S+ (\S+) train` \|\n', text, flags=re.MULTILINE)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('data_folder', type=Path)
    data = parser.parse_args().data_folder
    before, rest = PAGE.read_text().split(BEGIN)
    made, after = rest.split(END)
    rows, graphs = old_rows(made), {}
    for label, published, spec_file, name in SPECS:
        spec = files.read_json(ROOT / 'slm_lab' / 'spec' / 'benchmark' / spec_file)[name]
        found = finished_run(data, name, spec)
        if found is not None:
            folder, returns = found
            rows[name] = row_of(label, published, spec_file, name, spec, returns)
            shutil.copy(
                folder / f'{name}_t0_trial_graph_mean_returns_ma_vs_frames.png', PAGE.parent / f'images/{name}.png'
            )
        if name in rows:
            env = spec['env'][0]['name']
            graphs.setdefault(env, []).append(f'![{label} on {env}](images/{name}.png)\n')
    table = HEAD + ''.join(rows[name] for *_, name in SPECS if name in rows)
    sections = ''.join(f'\n## {env}\n\n{"".join(lines)}' for env, lines in graphs.items())
    PAGE.write_text(f'{before}{BEGIN}\n{table}{sections}\n{END}{after}')


if __name__ == '__main__':
    main()
