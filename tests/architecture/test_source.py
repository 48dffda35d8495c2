import ast
import re
from collections.abc import Iterator

from tests.architecture.tree import ROOT, modules, syntax, tracked_files

PYTHON_FILES = [path for path in tracked_files() if path.suffix == ".py"]
# Written in pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile("|".join(("/wo" + "rk/", "/tm" + "p/", "/ro" + "ot/", "/ho" + "me/")))
REGISTRY_HOSTS = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + "js", "debian" + r"\.org")))


def _public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public_definitions(child)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_every_public_definition_says_what_it_is() -> None:
    silent = [
        f"{module}.{definition.name}"
        for module, file in modules().items()
        for definition in _public_definitions(syntax(file))
        if not ast.get_docstring(definition)
    ]
    assert silent == []


def test_every_module_says_what_it_is_about() -> None:
    assert [name for name, file in modules().items() if not ast.get_docstring(syntax(file))] == []


def test_no_module_is_called_utils() -> None:
    assert [str(file) for file in PYTHON_FILES if re.fullmatch(r"_?(utils?|helpers?|misc|common)", file.stem)] == []


def test_imports_are_absolute_and_of_one_lightning() -> None:
    banned = re.compile(r"\.|(pytorch_lightning|strategies|callbacks)(\.|$)")
    wrong = [(file.name, name) for file in PYTHON_FILES for name in _imported_names(syntax(file)) if banned.match(name)]
    assert wrong == []


def test_no_file_names_a_machine_s_path_or_a_package_registry() -> None:
    found = []
    for file in tracked_files():
        text = "" if file.is_symlink() else file.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{file.relative_to(ROOT)}: {match}" for match in MACHINE_PATHS.findall(text)]
        found += [f"{file.relative_to(ROOT)}: {match}" for match in REGISTRY_HOSTS.findall(text)]
    assert found == []


def test_the_only_links_are_the_two_that_show_tools_the_top_level_packages() -> None:
    links = {path.relative_to(ROOT).as_posix(): str(path.readlink()) for path in tracked_files() if path.is_symlink()}
    assert links == {
        "lightning_dalle/callbacks": "../callbacks",
        "lightning_dalle/strategies": "../strategies",
    }
