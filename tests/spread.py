"""Which tests share one of pytest-xdist's workers: a file's; of tests/e2e also those that share
running replicas, which no two tests may use at once, and whose start takes longer than most tests;
and all of tests/slurm, which share one cluster.
"""

from __future__ import annotations

from fnmatch import fnmatch

from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/gpu/*", "tests/e2e/test_wan_*", "tests/slurm/*")
ALONE = (
    "test_contracts",
    "test_families",
    "test_float32_streams",
    "test_fp8",
    "test_kill_storm",
    "test_replica",
    "test_replica_start",
    "test_report_browser",
    "test_sft_data",
    "test_sft_families",
    "test_traps",
)  # of tests/e2e
ORDER = (
    "tests/e2e/",
    "tests/slurm/",
    "tests/gpu/",
    "tests/distributed/",
    "tests/unit/train/test_recipes.py",
    "tests/unit/planner/test_memory_plan.py",
    "tests/unit/planner/test_plan_advice.py",
    "tests/unit/planner/test_engine_memory.py",
    "tests/unit/rewards/test_reward_exit.py",
    "tests/unit/convert/",
    "tests/unit/tools/",
)  # the longest first, the many short ones last: else one worker waits for the other at the end


def scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    for pattern in TOGETHER:
        if fnmatch(file, pattern):
            return pattern
    folder, _, name = file.rpartition("/")
    if folder == "tests/e2e" and name.removesuffix(".py") not in ALONE:
        return "the registry of tests/e2e/conftest.py"
    return file


def place(nodeid: str) -> int:
    """In the order that tests are given to the workers."""
    return next(
        (index for index, folder in enumerate(ORDER) if nodeid.startswith(folder)), len(ORDER)
    )


class Spread(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
