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


def test_recipes_are_matched_by_the_package_data() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["lightning_dalle"]
    matched = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in {".yaml", ".typed", ".json"}}
    assert data == matched
