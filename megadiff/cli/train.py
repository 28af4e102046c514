"""megadiff train CONFIG.yaml … key=value …

On several GPUs: torchrun --nproc-per-node N -m megadiff.cli.main train …

Config files are merged left to right, then key=value. --dry-run checks everything, prints the
resolved config, the schedule with its stochastic window and the batch arithmetic, and stops.
Exit codes: 0 done, 1 the run failed, 2 the config is wrong, 143 stopped by SIGTERM, 130 by Ctrl-C,
129 by a terminal that closes, 75 stopped by SIGUSR1 or the file `stop` in the run's folder: start
it again, and it goes on.
A stopped run leaves the file `stopped` in its folder, as torchrun turns all codes but 0 into 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megadiff.checkpoint.checkpoints import CheckpointError
from megadiff.cli.console import INTERRUPTED, interrupted_text, leave, log_to_stderr
from megadiff.config.docs import to_text as keys_to_text
from megadiff.config.load import check_model_path, load_config
from megadiff.config.schema import Config
from megadiff.data.images import ImageSource
from megadiff.engines import check_engine_installed
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.trackers import Trackers
from megadiff.parallel.collectives import AgreedError, read_once
from megadiff.parallel.mesh import (
    Layout,
    Mesh,
    init_mesh,
    local_world_size_of,
    rank_from_env,
    world_size_from_env,
)
from megadiff.process.descriptors import raise_soft_limit, rank_sockets, reserve_descriptors
from megadiff.process.garbage import freeze_startup_objects
from megadiff.process.lifeline import kill_children, launcher_pid, watch
from megadiff.process.stacks import FOLDER as STACKS
from megadiff.process.stacks import announce, drop_leftovers
from megadiff.process.title import set_title
from megadiff.train.build import build_run, build_sft_run, collective_timeout_s
from megadiff.train.check import check
from megadiff.train.dry_run import describe, to_text
from megadiff.train.loop import Run, train
from megadiff.train.rescue import Rescue
from megadiff.train.resume_point import is_finished
from megadiff.train.run import make_run_folder, run_folder
from megadiff.train.run_lock import lock
from megadiff.train.sft import SftRun, train_sft
from megadiff.train.stop import BuildWatch, StopFiles, Unwinding

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code; errors of the user go to stderr as one text, without a traceback."""
    options, config_arguments = _parser().parse_known_args(argv)
    if options.help_config:
        sys.stdout.write(keys_to_text())
        return 0

    # torchrun's; the mesh, which knows it too, is built only when all is checked.
    rank = rank_from_env()
    log_to_stderr(rank)

    try:
        arguments = [*options.config, *config_arguments]
        config = load_config(arguments)
        check_model_path(config, arguments)
        world_size = world_size_from_env()

        _check_options(options)
        if options.dry_run:
            world_size = options.world_size or world_size
            ranks_per_node = options.gpus_per_node or local_world_size_of(world_size)

            with ExitStack() as stack:
                layout, adapter, data, _ = check(
                    config, world_size=world_size, stack=stack, ranks_per_node=ranks_per_node
                )
            _warn_of_layout(config, adapter, layout, ranks_per_node=ranks_per_node)
            num_prompts = data.num_items if isinstance(data, ImageSource) else len(data)
            plan = describe(
                config, layout, adapter, num_prompts=num_prompts, ranks_per_node=ranks_per_node
            )
            sys.stdout.write(to_text(plan, as_json=options.json) if rank == 0 else "")
            return 0
        set_title(f"{config.run.name}: rank {rank}")
        train_rank(config, world_size=world_size)
        # not on the way out of an error: other ranks may never answer
        dist.destroy_process_group()
        return 0
    except ValueError as error:
        return _fail(error, rank, code=2)
    except (AgreedError, OSError, FloatingPointError) as error:
        return _fail(error, rank, code=1)
    except torch.OutOfMemoryError as error:
        advice = (
            "lower train.microbatch_size or engine.activation_memory_budget; see `megadiff plan`"
        )
        return _fail(RuntimeError(f"{error}; {advice}"), rank, code=1)
    except Unwinding as stop:  # a signal while the run was built
        return _stopped_early(int(stop.code or 0))
    except SystemExit as stop:  # a signal, or another rank's failure: all is closed by now
        return int(stop.code or 0)
    except KeyboardInterrupt:  # once training has begun, a rescue answers Ctrl-C
        return _stopped_early(INTERRUPTED)
    except Exception:  # shown whole; what it left ends in leave()
        logger.exception("rank %d failed", rank)
        return 1


def _check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options of --dry-run without it, which would be ignored."""
    given = {
        "--json": options.json,
        "--world-size": options.world_size,
        "--gpus-per-node": options.gpus_per_node,
    }
    for name, value in given.items():
        if value and not options.dry_run:
            raise ValueError(f"{name} is for --dry-run; give both, or leave it out")
        if value < 0:
            raise ValueError(f"{name} {value} < 1; give how many there are")


def train_rank(config: Config, *, world_size: int, ends_process: bool = True) -> None:
    """Train as one rank of a run, in the main thread; its process group stays.

    ends_process: whether a run that is asked to stop and cannot, or is asked again, ends this
    process.
    Raises what main() turns into an exit code, SystemExit among it: a signal asked to stop.
    """
    building = BuildWatch(ends_process=ends_process)
    launcher = _Launcher()

    with ExitStack() as stack:
        stack.callback(building.over)
        layout, adapter, data, scorer = check(config, world_size=world_size, stack=stack)

        check_engine_installed(config)
        if rank_from_env() == 0:
            # One lock a run: its ranks share the folder.
            folder = make_run_folder(config)
            lock(folder, stack)
            files = StopFiles(folder)
            files.begin()
            building.requests.files = files
            drop_leftovers(run_folder(config) / STACKS, began_s=files.start_s)
        # before ranks wait for one another, which is where runs hang
        announce(run_folder(config) / STACKS, f"rank_{rank_from_env()}")

        _reserve_sockets(config, layout)
        mesh = init_mesh(layout, config.run.device, timeout_s=collective_timeout_s(config))
        if is_finished(config, mesh):
            _report_finished(config, mesh)
            return
        _share_cores(mesh)
        if mesh.rank == 0 and mesh.device.type == "cuda":
            num_bytes = torch.cuda.get_device_properties(mesh.device).total_memory
            ranks_per_node = local_world_size_of(world_size)
            _warn_of_layout(
                config, adapter, layout, ranks_per_node=ranks_per_node, num_bytes=num_bytes
            )

        _choose_offload(config, adapter, mesh)
        run: Run | SftRun
        if isinstance(data, ImageSource):
            run = build_sft_run(config, mesh, adapter, data, scorer, stack)
        else:
            assert scorer is not None, "check() refuses prompts without a reward"
            run = build_run(config, mesh, adapter, data, scorer, stack)

        freeze_startup_objects()
        building.over()
        run.rescue.start(ends_process=ends_process)
        launcher.rescue = run.rescue

        try:
            train(run) if isinstance(run, Run) else train_sft(run)
            if mesh.rank == 0:
                run.events.write("run_finished", step=run.progress.step)
                _write_report(config, run.recorder.trackers)
        except SystemExit:  # a signal, or another rank's failure: it has been dealt with
            # Of several ranks the first that ends takes the others along; a rescue is in a hurry.
            if mesh.world_size == 1 and not run.rescue.requests.is_over:
                _write_report(config, run.recorder.trackers)
            raise
        except BaseException as error:
            if run.rescue.requests.is_over:
                # SystemExit came in the middle of a lock, which then raised something else
                raise SystemExit(run.rescue.exit_code) from error
            if not isinstance(error, CheckpointError):  # it would fail again
                run.rescue.failed(error)
            raise
        finally:
            run.rescue.stop()


def _reserve_sockets(config: Config, layout: Layout) -> None:
    """Take the open files that groups need. Raises ValueError for too few; gloo names no fix."""
    raise_soft_limit()  # of replicas too, which are started later
    backend = config.engine.backend
    num_sockets = rank_sockets(
        world_size=layout.world_size,
        sp=layout.sp,
        tp=layout.tp,
        dp_replicate=layout.dp_replicate,
        backend=backend,
    )
    reserve_descriptors(num_sockets, what=f"one of {layout.world_size} ranks with {backend}")


def _share_cores(mesh: Mesh) -> None:
    """Let a rank on CPUs use its part of them: torchrun gives each rank one thread."""
    if mesh.device.type == "cpu" and "LOCAL_WORLD_SIZE" in os.environ:
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))


def _report_finished(config: Config, mesh: Mesh) -> None:
    """Write the report of a run that was finished before, where it is missing."""
    if mesh.rank == 0 and not (run_folder(config) / "report.html").exists():
        _write_report(config)


def _write_report(config: Config, trackers: Trackers | None = None) -> None:
    """Write the run's page, for its trackers too. A failure is a warning: the run is whole."""
    # it takes a tenth of a second, and the other ranks need none of it
    from megadiff.report.report import write_report

    folder = run_folder(config)
    try:
        page = write_report(folder)
        if trackers:
            trackers.page(page)
    # Whatever it is, the run's own end must not look like a failure.
    except Exception as error:
        text = "no report: %s: %s; try `megadiff report %s`"
        logger.warning(text, type(error).__name__, error, folder, exc_info=True)


def _warn_of_layout(
    config: Config,
    adapter: ModelAdapter,
    layout: Layout,
    *,
    ranks_per_node: int,
    num_bytes: int | None = None,
) -> None:
    """Warn where weights go across nodes in every step and need not. num_bytes: of one GPU."""
    if layout.world_size <= ranks_per_node:
        return
    # it takes seconds, and a run on one node needs none of it
    from megadiff.planner.network_text import layout_warning

    warning = layout_warning(
        config, adapter, layout, ranks_per_node=ranks_per_node, num_bytes=num_bytes
    )
    if warning:
        logger.warning("%s", warning)


def _choose_offload(config: Config, adapter: ModelAdapter, mesh: Mesh) -> None:
    """Replace engine.offload=auto by what it means on these GPUs, for all ranks. Collective.

    It stays auto where that needs no plan: on a CPU, beside no replica, and for several components.
    """
    is_colocated = config.rollout.mode == "colocated" and mesh.device.type == "cuda"
    if config.engine.offload != "auto" or not is_colocated or len(adapter.components) > 1:
        return

    def choose() -> tuple[str, str]:
        # it takes seconds, and other runs need none of it
        from megadiff.planner.offload_choice import offload_choice

        return offload_choice(
            config,
            adapter,
            world_size=mesh.world_size,
            ranks_per_node=mesh.local_world_size,
            num_bytes=torch.cuda.get_device_properties(mesh.device).total_memory,
        )

    choice, reason = read_once(choose, source=0, group=mesh.cpu_group, world=mesh.cpu_group)
    config.engine.offload = choice
    logger.info("engine.offload=auto is %s: %s", choice, reason)


class _Launcher:
    """torchrun, which this rank ends with: at once while the run is built, later by a rescue."""

    def __init__(self) -> None:
        self.rescue: Rescue | None = None
        pid = launcher_pid()
        if pid is not None:
            watch(os.pidfd_open(pid), self._gone)

    def _gone(self) -> None:
        if self.rescue is not None:
            self.rescue.launcher_gone()
        kill_children()
        os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", help="yaml files and key=value overrides")
    parser.add_argument(
        "--dry-run", action="store_true", help="check, print the plan of the run, and stop"
    )
    parser.add_argument(
        "--help-config", action="store_true", help="print every config key, and stop"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: one JSON object on stdout"
    )
    parser.add_argument(
        "--world-size", type=int, default=0, help="with --dry-run: plan for this many processes"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=0,
        help="with --dry-run: processes on one node; by default as torchrun says, else all",
    )

    return parser


def _stopped_early(code: int) -> int:
    if code == INTERRUPTED:
        sys.stderr.write(interrupted_text("train"))
    return code


def _fail(error: Exception, rank: int, *, code: int) -> int:
    if rank == 0 or not isinstance(error, AgreedError):  # what all ranks know is said once
        sys.stderr.write(f"error: {error}\n" if rank == 0 else f"error: rank {rank}: {error}\n")
    logger.debug("traceback", exc_info=error)
    return code


if __name__ == "__main__":
    leave(main())
