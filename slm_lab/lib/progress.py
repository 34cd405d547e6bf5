"""One progress bar per session on a terminal; nothing where stderr is none, since the log's lines serve there."""

import math
import sys
import time

_DRAW_EVERY = 0.2  # seconds
_LOOK_EVERY = 0.02  # seconds between looks at the clock: short, since training may begin to run a hundred times slower


class Progress:
    """Shows frames, return, frames per second and time left.

    Args:
        total: the frame at which the session ends
        initial: the frame at which this process begins; the rate and the time left count from here
        label: what stands before the bar
        position: line of the bar, for sessions side by side
    """

    def __init__(self, total, initial, label, position=0):
        self.total = total
        self._bar = _make_bar(total, initial, label, position) if sys.stderr.isatty() else None
        # the next frame at which looking at the clock is worth it; until then a step costs one comparison
        self._next_look = math.inf if self._bar is None else initial
        self._looked_frame, self._looked_at, self._drawn_at = initial, time.perf_counter(), -math.inf

    def update(self, frame):
        if frame >= self._next_look:
            self._look(frame)

    def set_return(self, value):
        """The return to show from the next drawing on."""
        if self._bar is not None:
            self._bar.set_postfix_str(f'return {value:.4g}', refresh=False)

    def close(self, frame=None):
        """Draws the bar for the last time, at `frame` when given, and leaves it there."""
        if self._bar is None:
            return
        if frame is not None:
            self._draw(frame)
        self._bar.close()
        self._bar, self._next_look = None, math.inf

    def _look(self, frame):
        now = time.perf_counter()
        if now - self._drawn_at >= _DRAW_EVERY:
            self._draw(frame)
            self._drawn_at = now
        rate = (frame - self._looked_frame) / max(now - self._looked_at, 1e-6)
        self._next_look = frame + max(1, int(rate * _LOOK_EVERY))
        self._looked_frame, self._looked_at = frame, now

    def _draw(self, frame):
        frame = min(frame, self.total)  # vector envs may end a little beyond
        if frame > self._bar.n:
            self._bar.update(frame - self._bar.n)
        else:
            self._bar.refresh()


def _make_bar(total, initial, label, position):
    from tqdm import tqdm  # only where a bar is shown

    class FrameBar(tqdm):
        monitor_interval = 0  # no helper thread: redraws are asked for here

        @property
        def format_dict(self):
            """tqdm's fields and our own: frames with thousands marked, and their rate per second."""
            fields = super().format_dict
            n, seconds = fields['n'] - fields['initial'], fields['elapsed']
            rate = fields['rate'] or (n / seconds if seconds else 0)
            return {**fields, 'frames': f'{fields["n"]:,}/{fields["total"]:,}', 'fps': f'{rate:,.0f} fps'}

    return FrameBar(
        total=total,
        initial=min(initial, total),
        desc=label,
        position=position,
        file=sys.stderr,
        mininterval=0,  # `Progress` says when to draw
        miniters=0,
        smoothing=0.1,
        dynamic_ncols=True,
        bar_format='{desc} {percentage:3.0f}%|{bar}| {frames}, {fps}, {remaining} left{postfix}',
    )
