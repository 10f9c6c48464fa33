"""Where bytes are unpickled, which can run any code: in the places listed here alone, each with its reason."""

import ast

import pytest
from test_layers import MODULES, imported, module_of

PICKLES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing.reduction",
}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
}
ALLOWED = {
    ("launch.ranks", "pickle"): "calls and results of the launcher's own children, over pipes that it made",
    ("launch.fork_server", "multiprocessing.reduction"): "descriptors that go to a child of this process",
    (
        "launch.hosts.follow_orders",
        "recv",
    ): "a pipe inside one process; what comes over the network is decoded by a codec",
}


def uses(source: str) -> set[str]:
    """What in a module's source unpickles, by name."""
    return {name for node in ast.walk(ast.parse(source)) for name in _used(node)}


def _used(node: ast.AST) -> set[str]:
    match node:
        case ast.Import() | ast.ImportFrom():
            names = imported(node)
            return {known for known in PICKLES for name in names if f"{name}.".startswith(f"{known}.")} | {
                name.rpartition(".")[2] for name in names if name.rpartition(".")[2] in OBJECTS or name == "torch.load"
            }
        case ast.Attribute(attr=name) if name in OBJECTS:
            return {name}
        case ast.Attribute(ast.Name("torch"), "load"):
            return {"load"}
        case ast.Call(ast.Attribute(attr="recv"), [], []):  # of a socket and of torch it has arguments
            return {"recv"}
        case ast.keyword("allow_pickle", ast.Constant(value)) if value:
            return {"allow_pickle"}
        case ast.Attribute(ast.Name("multiprocessing"), "Manager" | "Queue" | "SimpleQueue" | "JoinableQueue" as name):
            return {name}
        case _:
            return set()


def test_nothing_is_unpickled_but_what_comes_from_this_launch_itself():
    found = {(module_of(path), name) for path in MODULES for name in uses(path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("from multiprocessing import reduction", "multiprocessing.reduction"),
        ("line.recv()", "recv"),
        ("dist.broadcast_object_list(found)", "broadcast_object_list"),
        ("from torch.distributed import all_gather_object", "all_gather_object"),
        ("torch.load(path)", "load"),
        ("from torch import load", "load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("multiprocessing.Queue()", "Queue"),
    ],
)
def test_a_planted_use_is_seen(source, name):
    assert uses(source) == {name}


@pytest.mark.parametrize("source", ["dist.recv(tensor)", "end.recv(4096)", "line.recv_bytes()", "np.load(path)"])
def test_what_takes_bytes_or_tensors_is_not(source):
    assert uses(source) == set()
