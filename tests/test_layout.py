"""The house's shape: rooms import only from rooms before them, and files stay readable."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = [
    "types", "quant", "kernels", "model", "convert", "noise", "data", "rollout", "reward",
    "algorithm", "training", "record", "evaluate", "build",
]  # fmt: skip
FILES = sorted(path for path in (ROOT / "qerl").rglob("*.py") if path.name != "__init__.py")
MAX_LINES, MAX_FUNCTION = 400, 60


def room(path: Path) -> int:
    return ROOMS.index(path.relative_to(ROOT / "qerl").parts[0].removesuffix(".py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_upstream(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if module.startswith("qerl."):
                source = module.split(".")[1]
                assert ROOMS.index(source) <= room(path), f"imports downstream room {source}"


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def is_device_code(function: ast.FunctionDef) -> bool:
    """Whether the function is a kernel: a straight run of device code that no call can split."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_within_their_budget(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not is_device_code(node):
            assert code_lines(node) <= MAX_FUNCTION, f"{node.name}: {code_lines(node)} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_build_sees_the_configuration(path: Path) -> None:
    if room(path) != ROOMS.index("build"):
        assert not re.search(r"DictConfig|OmegaConf|hydra", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
