"""A folder of megadiff/ imports only from those above it, and a class name means one thing.

So any file can be read knowing only what is above.
"""

import ast
from collections import defaultdict
from pathlib import Path

import megadiff

ORDER = (
    "types config observe diffusion algorithms process parallel tensors models sync data rewards "
    "engines checkpoint rollout train planner convert report doctor cli api"
).split()
# They import the house; of the house cli alone imports them.
OUTBUILDINGS = ("planner", "convert", "report", "doctor")
# It says what the other outbuildings say of a model and a config.
DOCTOR_ASKS = ("planner",)
ROOT = Path(megadiff.__file__).parent


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path.relative_to(ROOT.parent)}:{node.lineno}: relative import; "
                "use an absolute one"
            )
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_folders_import_only_from_above():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        assert layer in ORDER, f"megadiff/{layer} has no place in the order; add it to ORDER"
        for name in _imports(path):
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if (
                package == "megadiff"
                and imported in ORDER
                and ORDER.index(imported) > ORDER.index(layer)
            ):
                wrong.append(
                    f"{path.relative_to(ROOT.parent)} imports {name}, which is below {layer}"
                )
    assert not wrong, "\n".join(wrong)


def test_outbuildings_are_never_imported_by_the_house():
    """A run needs no planner, converter, report or example; only the commands in cli reach them."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in _imports(path):
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            is_asked = layer == "doctor" and room in DOCTOR_ASKS
            is_foreign = (
                package == "megadiff"
                and room in OUTBUILDINGS
                and layer not in (room, "cli")
                and not is_asked
            )
            if is_foreign or package == "examples":
                wrong.append(f"{path.relative_to(ROOT.parent)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_programs_of_rollout_do_not_import_each_other():
    """Trainer, server and worker are three processes; what they share stands beside the folders."""
    programs = ("client", "server", "worker")
    wrong = []
    for path in sorted((ROOT / "rollout").rglob("*.py")):
        program_of_file = path.relative_to(ROOT / "rollout").parts[0]
        # A file beside the folders is shared, so it may import none of the three.
        foreign = tuple(
            f"megadiff.rollout.{program}." for program in programs if program != program_of_file
        )
        wrong += [
            f"{path.relative_to(ROOT.parent)} imports {name}"
            for name in sorted(_imports(path))
            if f"{name}.".startswith(foreign)
        ]
    assert not wrong, "\n".join(wrong)


def test_schema_imports_no_torch():
    files = ("schema", "algorithm", "rewards", "rollout", "key")
    names = set().union(*(_imports(ROOT / "config" / f"{file}.py") for file in files))
    of_house = {name for name in names if name.partition(".")[0] in ("torch", "megadiff")}
    assert all(
        name.startswith(tuple(f"megadiff.config.{file}" for file in files)) for name in of_house
    )


def test_a_class_name_occurs_once():
    """So that a name means one thing wherever it is read."""
    files = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(f"{path.relative_to(ROOT.parent)}:{node.lineno}")
    doubles = {name: where for name, where in files.items() if len(where) > 1}
    assert not doubles, f"class names that occur more than once; rename all but one: {doubles}"
