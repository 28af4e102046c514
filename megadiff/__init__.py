"""Train large diffusion transformers with online RL: trainer, replicas, and weights between.

For a notebook: `from megadiff import load_config, train, evaluate, score, Replica`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# name → its name in megadiff.api
_API = {
    "Replica": "ReplicaSession",
    "evaluate": "evaluate",
    "load_config": "load_config",
    "score": "score",
}
# train is the package of that name, which can be called
__all__ = ["Replica", "evaluate", "load_config", "score", "train"]

if TYPE_CHECKING:
    from megadiff.api import ReplicaSession as Replica
    from megadiff.api import evaluate, load_config, score, train
else:

    def __getattr__(name: str) -> object:
        """Import the API when it is first used: `import megadiff` alone takes no time."""
        if name not in _API:
            raise AttributeError(f"module 'megadiff' has no attribute {name!r}")

        from megadiff.cli.console import quiet_imports

        quiet_imports()
        from megadiff import api

        return getattr(api, _API[name])
