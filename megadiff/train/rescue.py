"""Save the last finished step, whatever ends a run early.

The end may be an error on any rank, a signal, or a launcher that was killed. A thread of every rank
does the saving: the main thread may sit in a collective that another rank will never join, where no
exception and no signal handler reaches it. So nothing here is collective. Ranks talk by files
(megadiff.train.board), and the engine's gate says which optimizer step a rank has come to.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.engines.engine import Engine
from megadiff.observe.events import Events
from megadiff.process.words import error_text
from megadiff.train.board import MOST_CHARS, Board, RankState, disagreement, outcome
from megadiff.train.stop import (
    CLOSE_S,
    FINISH_S,
    LEAVE_S,
    StopFiles,
    StopRequests,
    end_now,
    handle_signals,
)
from megadiff.types import Progress

logger = logging.getLogger(__name__)
ANSWER_S = 30.0  # for a rank to say where it stands
CATCH_UP_S = 10.0  # for ranks to come to the same optimizer step
CHANGE_S = 120.0  # for an exchange of masters on the host to end
WARN_S = 60.0  # between two warnings of a filesystem that does not answer
SAVE_S = 1800.0  # for a rank to write its part; one of this node that is gone is seen at once
RESCUE_S = 4 * SAVE_S  # for all: a rank writes, waits for the others' parts, then for rank 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The newest finished step. num_steps: the gate's count by then."""

    progress: Progress
    num_steps: int


class Rescue:
    """Watches over one attempt of a run, from start() to stop(), on every rank.

    finish_step() is called by the loop. failed() is called by the main thread with its error.
    A request that leaves time for the step in flight is first obeyed by the loop, at that step's
    end (RunParts.end_step); the rescue comes when the time is over.
    recorded: returns the last step whose metrics are written; rank 0 waits for the newest one's.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        board: Board,
        progress: Progress,
        *,
        recorded: Callable[[], float] = lambda: math.inf,
        events: Events | None = None,
    ) -> None:
        self.engine = engine
        self.checkpoints = checkpoints
        self.board = board
        self.recorded = recorded
        self._events = events or Events(None)
        # One rank looks for the file: over NFS others may see one that is gone.
        files = StopFiles(board.folder.parent) if board.own_state.rank == 0 else None
        self.requests = StopRequests(files)
        self.exit_code = 1

        self._finished = Finished(progress=replace(progress), num_steps=engine.gate.num_steps)
        self._settled_at = self._finished
        self._in_flight = checkpoints.in_flight
        self._first_step = progress.step
        self._is_last_step = False  # the step that is on is the last one
        self._main_failed = threading.Event()
        self._stopped = threading.Event()
        self._reason = ""
        self._is_last_save = False  # all ranks write the checkpoint after which they leave
        self._patience_s = ANSWER_S
        self._warned_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="rescue", daemon=True)

    def start(self, *, ends_process: bool = True) -> None:
        """Take over SIGTERM and SIGINT, and listen. Every rank's board is laid out by now.

        ends_process: as StopRequests has it.
        """
        self.requests.ends_process = ends_process
        self.board.say()
        self.requests.pipe.open(self._on_signal)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening: the run is over, or its end has been dealt with."""
        self._stopped.set()
        self.requests.pipe.wake()
        self._thread.join(timeout=1.0)
        signal.set_wakeup_fd(-1)
        if not self.requests.ends_process:
            handle_signals(lambda *_: None)  # half-closed replicas would keep their GPU memory
            return
        is_leaving = self.requests.is_over or self._is_last_save
        handle_signals(lambda number, _: end_now(self.exit_code if is_leaving else 128 + number))
        if is_leaving or self._main_failed.is_set():
            closing = threading.Timer(CLOSE_S, os._exit, args=(self.exit_code,))
            closing.daemon = True
            closing.start()

    def finish_step(self, progress: Progress, prompts: dict) -> None:
        """Count a finished step in progress. Its weights are what a rescue saves from now on."""
        progress.step += 1
        progress.prompts = prompts
        self._finished = Finished(progress=replace(progress), num_steps=self.engine.gate.num_steps)
        if self._is_last_step:
            self.engine.gate.close()

    def leave_together(self, exit_code: int, any_rank: Callable[[bool], bool]) -> bool:
        """Let the loop save and leave, as all ranks have agreed on. Only errors end it earlier.

        False where a rescue has begun, as any_rank() tells: it saves for all. Collective.
        """
        self._is_last_save = True  # first, so that no rescue begins meanwhile
        self._is_last_save = not any_rank(bool(self._reason))
        self.exit_code = exit_code if self._is_last_save else self.exit_code
        return self._is_last_save

    def say_stopped(self) -> None:
        """Say on rank 0 what is on disk, for people and for the launcher."""
        assert self.requests.files is not None
        first = self.requests.first
        reason = first.reason if first else "another rank was asked to stop"
        self.requests.files.obeyed(reason=reason, exit_code=self.exit_code)
        text = f"{reason}: {outcome(self.checkpoints, RankState(rank=0), '')}"
        logger.warning("%s", text)
        self._events.write("run_stopped", step=self._finished.progress.step, text=text)

    def failed(self, error: BaseException) -> None:
        """Save what is whole, after the main thread's error. Returns then, or after RESCUE_S.

        Raises SystemExit where a rescue was saving already. It may have aborted the collective that
        the main thread was in, so the error is of no interest.
        """
        if self.requests.is_over or not self._thread.is_alive():
            return
        was_saving = self.engine.gate.has_ended
        self._main_failed.set()
        self._end(error_text(error))
        if was_saving:
            logger.info("while a rescue was saving: %s", error_text(error))
            raise SystemExit(self.exit_code) from error

    def launcher_gone(self) -> None:
        """Save what is whole, as torchrun was killed; returns when the process should be gone."""
        self._end("the launcher (torchrun) is gone")
        time.sleep(LEAVE_S)

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.requests.pipe.wake()
        # Bounded: a copy from a GPU that hangs never ends, and the process would keep the GPU.
        self._thread.join(RESCUE_S)

    def _on_signal(self, number: int, frame: object) -> None:
        """Let the main thread leave once the rescue is over; until then signals only wake it."""
        if self.requests.is_over:
            raise SystemExit(self.exit_code)

    def _run(self) -> None:
        try:
            reason = self._listen()
            if not reason:
                return
            self.rescue(reason)
        except BaseException as error:  # whatever it is, the process must end
            logger.exception("the rescue failed")
            with suppress(OSError):
                self.board.say(error=f"{type(error).__name__}: {error}"[:MOST_CHARS])
        if not self._main_failed.is_set():
            self._leave()

    def _listen(self) -> str:
        """Wait for a reason to end; '' after stop()."""
        while not self._stopped.is_set():
            self.requests.listen()
            try:
                self._look_around()
            except OSError as error:  # a network filesystem has its moments; the run goes on
                self._warn(error)
            if self._reason and not self._stopped.is_set():
                with suppress(OSError):  # the others have the same signal, or see this rank end
                    self.board.raise_alarm(self._reason, self.exit_code)
                return self._reason
        return ""

    def _look_around(self) -> None:
        """Find a reason to end before the step in flight is finished, if there is one."""
        # All ranks are in the last save, which another rank's alarm or a signal must not disturb.
        if self._reason or self._is_last_save:
            return
        request = self.requests.first
        # torchrun sends SIGTERM also when a rank is gone, and the step can never be finished
        if request and (self.requests.must_drop() or self.board.neighbour_is_gone()):
            self._reason = request.reason
            self.exit_code = request.exit_code
            return

        if not self.board.is_due():
            return
        alarm = self.board.alarm()
        if alarm.reason:
            self._reason = alarm.reason
            self.exit_code = alarm.exit_code
        elif self.board.is_gone():
            self._reason = f"{self.board.folder} is gone, another attempt of the run began"

    def _warn(self, error: OSError) -> None:
        """Warn that a look failed, and not at every look."""
        if time.monotonic() - self._warned_s >= WARN_S:
            self._warned_s = time.monotonic()
            logger.warning("%s does not answer: %s; looking again", self.board.folder, error)

    def rescue(self, reason: str) -> None:
        """Bring all ranks to one optimizer step, save, and say in one line what came of it."""
        # this thread, which listened so far, is busy from here on
        threading.Thread(target=self._end_at_a_second_signal, daemon=True).start()
        is_ahead = self._finished.progress.step > self.checkpoints.saved_step
        if is_ahead and self.board.own_state.rank == 0:
            at_once = "; a second signal ends at once, without it"
            logger.warning("%s: saving%s", reason, at_once if self.requests.ends_process else "")

        states = self._settled()
        first = states[0]
        is_new = first.finished_step > first.saved_step
        problem = disagreement(states)
        if is_new and not problem:
            problem = self._save(states)
        is_whole = not problem  # else a launcher might start a run that fails again and again
        if not is_new and not first.error and first.has_come("settled"):
            problem = ""  # whoever is missing takes nothing along that is not on disk

        # the first rank that is there tells the outcome for all
        present = [state.rank for state in states if state.has_come("settled")] or [0]
        if self.board.own_state.rank == present[0]:
            text = f"{reason}: {outcome(self.checkpoints, first, problem)}"
            logger.error("%s", text)
            self._events.write("run_stopped", step=self._finished.progress.step, text=text)

        if self.board.own_state.rank == 0:
            step = self._settled_at.progress.step
            if step > self._first_step:  # its row must not be missing later
                self._wait_until(lambda: self.recorded() >= step, LEAVE_S)
            if is_whole and self.requests.files:
                self.requests.files.obeyed(reason=reason, exit_code=self.exit_code)
            self.board.say(phase="done")

        # Not before rank 0 is done: torchrun ends all ranks when the first of them ends.
        if first.has_come("settled"):
            self.board.wait_for("done", ranks=[0], timeout_s=SAVE_S)

    def _settled(self) -> list[RankState]:
        """Bring all ranks to one optimizer step, at the end of a step if it can be.

        Each rank computes the same target from the same files.
        """
        gate = self.engine.gate
        self._say_where("closed", gate.close())
        states = self._ranks_at("closed")

        own_state = self.board.own_state
        most = max(state.steps for state in states)
        is_between = own_state.steps == most == own_state.counted_steps
        if not is_between and not any(state.has_failed for state in states):
            self._is_last_step = True
            gate.open()
            self._wait_until(lambda: self._finished.num_steps >= most, FINISH_S)

        self._say_where("stepped", gate.close())
        states = self._ranks_at("stepped")

        # A rank steps only after the norm's all-reduce, which every rank has then joined. So all
        # can reach the highest count.
        most = max(state.steps for state in states)
        gate.close(most)
        self._wait_until(lambda: gate.num_steps >= most, CATCH_UP_S)

        self._say_where("settled", gate.close())
        return self._ranks_at("settled")

    def _ranks_at(self, phase: str) -> list[RankState]:
        """Wait for all ranks; one that did not answer once is not waited for again."""
        states = self.board.wait_for(phase, timeout_s=self._patience_s)
        if not all(state.has_come(phase) for state in states):
            self._patience_s = 1.0
        return states

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the main thread to bring the condition about, as long as it can."""
        deadline = time.monotonic() + timeout_s
        while not (condition() or self._main_failed.is_set()) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _say_where(self, phase: str, num_steps: int) -> None:
        self._settled_at = self._finished
        # Before saved_step: the main thread may complete it meanwhile.
        self._in_flight = write = self.checkpoints.in_flight
        self.board.say(
            phase=phase,
            writing_step=write.progress.step if write else 0,
            steps=num_steps,
            counted_steps=self._settled_at.num_steps,
            finished_step=self._settled_at.progress.step,
            saved_step=self.checkpoints.saved_step,
            has_failed=self._main_failed.is_set(),
        )

    def _save(self, states: list[RankState]) -> str:
        """Write this rank's part; rank 0 completes the checkpoint. Returns what went wrong."""
        finished_step = states[0].finished_step
        progress = self._settled_at.progress
        write = self._in_flight

        try:
            if write and min(state.writing_step for state in states) >= finished_step:
                # Every rank has a copy of this step, which no update of the next one has changed.
                aside = write.aside
                progress = write.progress
                write.wait(SAVE_S)
            else:
                aside = self.checkpoints.begin_rescue(finished_step)
                self.engine.save_now(aside, CHANGE_S)
                self.checkpoints.save_beside(aside, finished_step)
            self.board.say(phase="saved")
        except (OSError, ValueError, RuntimeError) as error:
            self.board.say(error=f"{type(error).__name__}: {error}"[:MOST_CHARS])

        deadline = time.monotonic() + SAVE_S
        if self.board.own_state.rank:
            # Rank 0 looks at all ranks. Only where it cannot tell does each look for itself.
            (told,) = self.board.wait_for("done", ranks=[0], timeout_s=SAVE_S)
            if told.phase == "done":
                return ""

        states = self.board.wait_for("saved", timeout_s=deadline - time.monotonic())
        failed = [state for state in states if state.error or not state.has_come("saved")]
        if failed:
            reason = failed[0].error or "it is gone, or took too long"
            return f"rank {failed[0].rank} could not write its part: {reason}"

        if self.board.own_state.rank == 0:
            try:
                self.checkpoints.complete(aside, progress)
            except (OSError, ValueError) as error:
                return f"{type(error).__name__}: {error}"

        return ""

    def _leave(self) -> None:
        """Make the main thread unwind, which stops replicas; end the process if it cannot.

        A notebook's main thread unwinds when its call into C returns.
        """
        self.requests.is_over = True
        # A real signal, as it may wait for a lock: one that Python only notes would not wake it.
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)
        if not self._stopped.wait(LEAVE_S) and self.requests.ends_process:
            end_now(self.exit_code)

    def _end_at_a_second_signal(self) -> None:
        while not self._stopped.is_set():
            self.requests.listen()
