"""By how much the memory of this process grows during a piece of work."""

import threading
from pathlib import Path

__all__ = ["PeakMemory"]


class PeakMemory:
    """Samples this process's anonymous memory every millisecond."""

    def __enter__(self):
        self._done = threading.Event()
        self._start = self._peak = self._now()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._done.set()
        self._thread.join()
        self.growth = max(self._peak, self._now()) - self._start

    def _sample(self):
        while not self._done.wait(0.001):
            self._peak = max(self._peak, self._now())

    def _now(self):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])
