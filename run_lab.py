"""The command of the lab: reads what is to be run, hands it over, and turns errors into one line and an exit status."""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from slm_lab.experiment.stop import StopRequest, parse_duration
from slm_lab.lib.errors import LabError, SpecError, suggest

EPILOG = """\
forms:
  run_lab.py                              the jobs of job/experiments.json
  run_lab.py JOB.json                     jobs: {"spec file": {"spec name": "mode"}}
  run_lab.py SPEC_FILE SPEC_NAME MODE     one spec; the file as given, else under slm_lab/spec/

modes:
  dev             one session, every train step checked, rendered where there is a display
  train           a new run, in data/<spec name>_<timestamp>/
  train@RUN       continue a run exactly where it stopped, or extend it after raising max_frame in the spec;
                  RUN is its folder, or `latest` for the newest run of this spec (dev@RUN likewise)
  enjoy@RUN       play the best nets of a run, or of a session by its _spec.json; writes nothing
  search          a search over many trials: not built yet
  verify@RUN      train again from a run's previous checkpoint to its newest and compare; exit status 1 if they differ

A new run may start from the nets of another (transfer, not continuation): "load_net": "<run folder>" in the agent spec.
Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint, print how to resume, and exit with 128 + the signal's number.

exit status: 0 done (or stopped by --stop-after), 1 a session failed or verify differs, 2 bad input, 130/143/138 stopped
"""

MODES = ('dev', 'train', 'search', 'enjoy', 'verify')
NEED_RUN = ('enjoy', 'verify')


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog='run_lab.py',
        description='Trains reinforcement-learning agents from specs.',
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='run_lab.py [--stop-after TIME] [JOB.json | SPEC_FILE SPEC_NAME MODE]',
    )
    parser.add_argument('words', nargs='*', metavar='JOB.json | SPEC_FILE SPEC_NAME MODE', help=argparse.SUPPRESS)
    parser.add_argument('--stop-after', metavar='TIME', help='checkpoint and exit with status 0 after e.g. 5h50m')
    args = parser.parse_args(argv)
    if len(args.words) not in (0, 1, 3):
        raise SpecError(f'{len(args.words)} arguments: give none, a job file, or SPEC_FILE SPEC_NAME MODE (see --help)')
    return args


def parse_mode(text):
    """Splits `train@data/run` at its first @. Returns: (mode, prename or None). Raises: SpecError"""
    mode, at, prename = text.partition('@')
    if mode not in MODES:
        raise SpecError(f"mode '{mode}' is unknown{suggest(mode, MODES)}")
    if mode == 'search':
        raise SpecError("mode 'search' is not built yet; use train")
    if at and not prename:
        raise SpecError(f"mode '{text}': name a run folder after the @, or 'latest'")
    if mode in NEED_RUN and not prename:
        raise SpecError(f"mode '{mode}' needs a run: {mode}@<run folder>, or {mode}@latest")
    return mode, prename or None


def read_jobs(words):
    """[(spec file, spec name, mode)] of the command line, or of a job file in its order. Raises: SpecError"""
    from slm_lab.lib import files, paths

    if len(words) == 3:
        return [tuple(words)]
    given = path = Path(words[0]) if words else Path('job/experiments.json')
    if not path.is_file() and paths.CHECKOUT:
        path = paths.CHECKOUT / path
    if not path.is_file():
        raise SpecError(f"job file '{given}' does not exist")
    jobs = files.read_json(path)
    if isinstance(jobs, dict) and any(isinstance(spec, dict) and 'agent' in spec for spec in jobs.values()):
        raise SpecError(f'{given} is a spec file: give SPEC_FILE SPEC_NAME MODE; its specs: {", ".join(jobs)}')
    if not isinstance(jobs, dict) or not all(isinstance(specs, dict) for specs in jobs.values()):
        raise SpecError(f'{path}: a job file is {{"spec file": {{"spec name": "mode"}}}}')
    return [(spec_file, name, str(mode)) for spec_file, specs in jobs.items() for name, mode in specs.items()]


def check_jobs(jobs):
    """Raises what is wrong with the input of any job, before the first one starts."""
    from slm_lab.spec import spec_util

    for spec_file, spec_name, lab_mode in jobs:
        _, prename = parse_mode(lab_mode)
        if prename is None:
            spec_util.get(spec_file, spec_name)


def run_job(spec_file, spec_name, lab_mode, stop):
    """Runs one spec in one mode. Returns: exit status"""
    mode, prename = parse_mode(lab_mode)
    if mode == 'enjoy':
        return enjoy(prename, spec_name, stop)
    if mode == 'verify':
        return verify(prename, spec_name, stop)
    return train(spec_file, spec_name, mode, prename, stop)


def train(spec_file, spec_name, mode, prename, stop):
    from slm_lab.experiment import resume
    from slm_lab.experiment.trial import Trial
    from slm_lab.lib import paths
    from slm_lab.spec import spec_util

    changes = ()
    if prename is None:
        spec = spec_util.override_spec(spec_util.get(spec_file, spec_name), mode)
    else:
        spec, _, changes = resume.open_run(prename, spec_file, spec_name, mode)
    trial = Trial(spec, mode, stop, resumes=prename is not None, changes=changes)

    def command():
        python = 'python' if shutil.which('python') == sys.executable else sys.executable
        return shlex.join([python, sys.argv[0], spec_file, spec_name, f'{mode}@{paths.for_display(trial.folder)}'])

    try:
        outcome = trial.run()
    except LabError:
        if (trial.folder / 'checkpoint').is_dir():
            print(f'Resume it with: {command()}')
        raise
    for name, value in outcome.metrics.items():
        print(f'  {name}: {value:g}' if isinstance(value, float) else f'  {name}: {value}')
    if not outcome.finished:
        at = ', '.join(f'session {index} at frame {frame}' for index, frame in sorted(outcome.frames.items()))
        print(f'Stopped by {stop.reason}; complete checkpoints: {at or "none, no session had begun"}')
    elif stop():
        print(f'Stopped by {stop.reason} when training was over; to have every graph, resume')
    print(f'Run folder: {paths.for_display(trial.folder)}')
    print(f'{"Resume" if stop() else "Extend"} it with: {command()}')
    return stop.exit_status


def enjoy(prename, spec_name, stop):
    from slm_lab.experiment.enjoy import find_session_spec, play
    from slm_lab.spec import spec_util

    spec, _ = find_session_spec(prename, spec_name)
    returns = play(spec_util.override_spec(spec, 'enjoy'), stop)
    if returns:
        print(f'{len(returns)} episodes, mean return {sum(returns) / len(returns):g}')
    return stop.exit_status


def verify(prename, spec_name, stop):
    from slm_lab.experiment import retro_analysis
    from slm_lab.experiment.verify import verify_run

    verdicts = verify_run(retro_analysis.find_run(prename, spec_name), stop)
    for verdict in verdicts:
        print(verdict)
    return int(any(verdict.difference for verdict in verdicts))


def main(argv=None):
    """Returns: exit status"""
    stop = StopRequest().install()  # before the slow imports: a signal then stops the run in good order
    try:
        args = parse_args(argv)
        if args.stop_after is not None:
            try:
                stop.deadline = time.time() + parse_duration(args.stop_after)
            except ValueError as e:
                raise SpecError(f'--stop-after: {e}') from None
        from slm_lab.lib import logger

        logger.setup()
        status, jobs = 0, read_jobs(args.words)
        if len(jobs) > 1:
            check_jobs(jobs)
        for job in jobs:
            status = run_job(*job, stop) or status
            if stop():
                break
        return status
    except LabError as e:
        print(f'error: {e}', file=sys.stderr)
        return e.exit_status
    except OSError as e:  # a disk that is full or read-only, a folder that is gone
        print(f'error: {e.filename or ""}: {e.strerror or e}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
