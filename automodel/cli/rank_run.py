"""One process's part of `automodel run`: it trains alone, or as one of several ranks that end together."""

import argparse
import contextlib
import logging
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.cli.complaints import complain
from automodel.cli.output import say, silence_stdout
from automodel.observe.rank_log import RankLog, flush_streams
from automodel.observe.run_folder import RunFolder
from automodel.observe.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from automodel.config.loader import ConfigNode
    from automodel.distributed.env import LaunchEnvironment
    from automodel.distributed.failures import Failure
    from automodel.distributed.membership import Membership

__all__ = ["FAILED", "INTERRUPTED", "USAGE_ERROR", "RankRun"]

logger = logging.getLogger(__name__)

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
_ANNOUNCED = {
    "automodel.checkpoint.store.CheckpointSaveError",
    "automodel.distributed.failures.PeerFailureError",
    "automodel.distributed.rank_group.PeerError",
    "automodel.training.loss.NonFiniteLossError",
}
_LATE_JOIN = 10.0  # seconds for a rank to join just to find out whether another one has told its mistake


class RankRun:
    """A run of one process, from the recipe to the exit status."""

    def __init__(self, args: argparse.Namespace, launch: "LaunchEnvironment") -> None:
        """Prepare to run with the options `args`."""
        self._args = args
        self._launch = launch
        self._log: RankLog | None = None
        self._membership: Membership | None = None
        self._folder: RunFolder | None = None
        self._recipe: Any = None

    def run(self, load: "Callable[[], ConfigNode]") -> int:
        """Load the recipe and train; returns the exit status.

        A failed rank of several whose process group is open does not return, since the end of the group may wait for
        collectives that never end; nor does a process that was interrupted while it imported torch, since what torch
        does at the end of a process needs all of it.
        """
        with ExitStack() as stack:
            stack.callback(self._close_log)
            if self._launch.rank > 0:
                self._log = RankLog().__enter__()
            status = self._attempt(load, stack)
        flush_streams()
        has_open_group = self._membership is not None and self._membership.has_open_group
        if status != 0 and (has_open_group or _is_torch_half_imported()):
            os._exit(status)
        return status

    def _attempt(self, load: "Callable[[], ConfigNode]", stack: ExitStack) -> int:
        try:
            config = load()
            with config.hiding_values():
                self._join(config)
                stack.push(self._end)
                self._set_up(config, stack)
        except KeyboardInterrupt:
            return self._fail(KeyboardInterrupt("interrupted"), status=INTERRUPTED, with_traceback=False)
        except Exception as error:  # noqa: BLE001 - a border: until the job stands, every error is about its recipe
            return self._fail(error, status=USAGE_ERROR, with_traceback=self._args.traceback)
        try:
            with config.hiding_values():
                return self._train()
        except KeyboardInterrupt:
            second = KeyboardInterrupt("interrupted twice; the last checkpoint is the one before")
            return self._fail(second, status=INTERRUPTED, with_traceback=False)
        except Exception as error:
            if self._launch.world_size == 1 and not _is_announced(error):
                # An error of the program, which keeps its traceback.
                raise
            with_traceback = self._args.traceback or (self._log is None and not _is_announced(error))
            return self._fail(error, status=FAILED, with_traceback=with_traceback)

    def _join(self, config: "ConfigNode") -> None:
        """Become a member of the job; the recipe says how long to wait for it."""
        from automodel.config.sections import build_section
        from automodel.distributed.config import DistEnvConfig
        from automodel.distributed.membership import Membership

        timeout = 60 * build_section(DistEnvConfig, config.get("dist_env"), "dist_env").timeout_minutes
        self._membership = Membership.join(self._launch, timeout_seconds=timeout)
        self._membership.on_peer_failure(self._tell_peer_failure)

    def _set_up(self, config: "ConfigNode", stack: ExitStack) -> None:
        """Build the job in its folder, which stays locked until `stack` closes."""
        from automodel.recipes.sections import find_recipe_class

        assert self._membership is not None
        timeline = Timeline(started=self._args.started)
        recipe_class = find_recipe_class(config)
        recipe = recipe_class(config, timeline=timeline, stream=sys.stdout, membership=self._membership)
        folder = self._open_folder()
        stack.enter_context(folder)
        self._folder = folder
        self._recipe = recipe
        # Closed before the folder is, so that an empty folder for checkpoints does not keep it alive.
        stack.push(self._end)
        recipe.setup(folder)

    def _open_folder(self) -> RunFolder:
        """Rank zero makes the folder, or continues in it, and says where it is; the others follow."""
        assert self._membership is not None
        launch, run_dir = self._launch, self._args.run_dir
        if launch.rank > 0:
            folder = RunFolder.join(Path(self._membership.receive("run_folder")))
            self._open_log(folder)
            return folder
        if run_dir is not None:
            folder = RunFolder(run_dir)
        else:
            folder = RunFolder.make_new(Path("runs"), Path(self._args.recipe).stem)
        self._membership.share("run_folder", str(folder.path.absolute()))
        _say(f"run folder: {folder.path}{' (continued)' if folder.is_continued else ''}")
        return folder

    def _train(self) -> int:
        outcome = self._recipe.run_train_validation_loop()
        self._close()
        if self._launch.rank == 0:
            losses = ", ".join(f"{name} {value:.4f}" for name, value in outcome.losses.items())
            _say(f"{outcome.status}: {outcome.steps_run} steps run{', ' + losses if losses else ''}")
            _say(f"report: {outcome.report}")
        return 0

    def _close(self) -> None:
        """Close the recipe, then end the membership together with the other ranks."""
        recipe, self._recipe = self._recipe, None
        if recipe is not None:
            recipe.close()
        if self._membership is not None:
            self._membership.close()

    def _fail(self, error: BaseException, *, status: int, with_traceback: bool) -> int:
        """Show the error, unless another rank has shown its cause; returns the exit status."""
        launch = self._launch
        if launch.world_size == 1:
            return complain(error, status=status, with_traceback=with_traceback)
        membership = self._membership or self._join_late(error)
        if membership is None:
            # Ctrl-C reaches all ranks, and they cannot agree who says so.
            is_cause = not isinstance(error, KeyboardInterrupt) or launch.rank == 0
        else:
            is_cause = membership.announce_failure(error)
            if not is_cause:
                # The rank whose error is shown has its own status.
                status = FAILED
        if is_cause:
            stream, hint = (sys.stderr, None) if self._log is None else (self._log.terminal, self._log.path)
            complain(
                error,
                status=status,
                with_traceback=with_traceback,
                rank=launch.rank,
                is_shared=isinstance(error, KeyboardInterrupt) or (status == FAILED and _is_announced(error)),
                traceback_file=hint,
                stream=stream,
            )
        # Only now, since the log may be on the disk that has failed.
        self._log_traceback(error, is_shown=is_cause)
        try:
            self._close()
        finally:
            if membership is not None:
                membership.close()
        return status

    def _log_traceback(self, error: BaseException, *, is_shown: bool) -> None:
        log = self._log
        if log is None:
            return
        try:
            log.write("".join(traceback.format_exception(error)))
        except OSError as failure:
            if is_shown:
                with contextlib.suppress(OSError):
                    print(f"  (the log of rank {self._launch.rank} cannot be written: {failure})", file=log.terminal)

    def _join_late(self, error: BaseException) -> "Membership | None":
        """Join the job after a mistake that came before this rank could, so that one rank alone tells it.

        An interrupt may have come while torch was imported, which cannot be tried again.
        """
        if isinstance(error, KeyboardInterrupt) and "automodel.distributed.membership" not in sys.modules:
            return None
        from automodel.distributed.membership import JoinError, Membership

        if not isinstance(error, JoinError):
            with contextlib.suppress(JoinError, ValueError):
                self._membership = Membership.join(self._launch, timeout_seconds=_LATE_JOIN)
        return self._membership

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        """Close everything when the run ends in a way that nothing else has handled, such as by SystemExit."""
        if error is not None and self._membership is not None:
            self._membership.announce_failure(error)
        self._close()

    def _tell_peer_failure(self, failure: "Failure") -> None:
        """Write what follows from a failure elsewhere into the log, on rank zero too; called in a thread.

        On the terminal the failure is told only if nobody else can.
        """
        assert self._membership is not None
        if self._log is None:
            self._log = RankLog().__enter__()
            if self._folder is not None:
                self._open_log(self._folder)
        logger.error("%s", failure.as_error)
        if self._membership.must_tell(failure):
            rank, stream = self._launch.rank, self._log.terminal
            complain(failure.as_error, status=FAILED, with_traceback=None, rank=rank, stream=stream)

    def _open_log(self, folder: RunFolder) -> None:
        """Write to the log in the run folder from now on; a run goes on without one, too."""
        assert self._log is not None
        log, rank = self._log, self._launch.rank
        try:
            log.open(folder.rank_log(rank), rank=rank, world_size=self._launch.world_size)
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"WARNING: the log of rank {rank} cannot be written: {error}", file=log.terminal)

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.__exit__(None, None, None)


def _say(text: str) -> None:
    """Print a line; where it cannot be written (a closed terminal, a full disk), it and the later ones go nowhere."""
    try:
        say(text)
    except OSError:
        silence_stdout()


def _is_torch_half_imported() -> bool:
    """Whether an import of torch was interrupted, which cannot be tried again."""
    return "torch" not in sys.modules and "torch._C" in sys.modules


def _is_announced(error: BaseException) -> bool:
    """Whether the loop announces errors of this class, on all ranks alike, so that they are none of the program."""
    # By name: to import their modules may take seconds, in which the other ranks end and the launcher ends this one.
    return any(f"{kind.__module__}.{kind.__qualname__}" in _ANNOUNCED for kind in type(error).__mro__)
