"""transformers' server: its names are where they are looked for, or the refusal says which is not."""

import sys

import pytest

from mmqc.cli.serving import peer as module
from mmqc.cli.serving.peer import PLACES, Peer, ServerMissingError, peer
from mmqc.versions import MovedError


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "openai"])
def test_peer__says_which_package_is_missing(package, monkeypatch):
    for name in ("fastapi", "uvicorn", "openai"):
        monkeypatch.setitem(sys.modules, name, sys)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ServerMissingError, match=rf"{package}: pip install 'mmqc\[serve\]'"):
        peer()


def test_peer__says_which_name_moved(monkeypatch):
    for name in ("fastapi", "uvicorn", "openai"):
        monkeypatch.setitem(sys.modules, name, sys)
    monkeypatch.setitem(module.PLACES, "build_server", "nowhere")
    with pytest.raises(
        MovedError, match=r"transformers \d.* has no transformers.cli.serving.nowhere:build_server, which mmqc serve"
    ):
        peer()


def test_application__has_none_for_the_handlers_that_we_have_none_of():
    def build_server(model_manager, chat_handler, new_handler, enable_cors=False):
        return model_manager, chat_handler, new_handler, enable_cors

    found = Peer(*(build_server if name == "build_server" else None for name in PLACES))
    assert found.application(model_manager=1, chat_handler=2) == (1, 2, None, False)
