from tests.architecture.tree import PACKAGE, ROOT, modules, project


def _packages_in_the_tree() -> set[str]:
    return {name for name, file in modules().items() if file.name == "__init__.py"}


def test_package_list_is_the_tree() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(_packages_in_the_tree())


def test_every_python_file_lies_in_a_package() -> None:
    packages = _packages_in_the_tree()
    assert [name for name in modules() if name.rpartition(".")[0] not in packages | {""}] == []


def test_mapping_to_top_level_folders_and_links_agree() -> None:
    mapping = project()["tool"]["setuptools"]["package-dir"]
    links = {f"lightning_dalle.{path.name}": path for path in PACKAGE.iterdir() if path.is_symlink()}
    assert set(mapping) == set(links)
    for name, link in links.items():
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / mapping[name]


def test_package_data_are_all_files_that_are_no_code() -> None:
    matched = set()
    for package, patterns in project()["tool"]["setuptools"]["package-data"].items():
        folder = modules()[package].parent
        matched |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert matched == {path for path in files if path.suffix != ".py"}
