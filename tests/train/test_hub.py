"""A push that cannot work is refused at the start; one that fails at the end keeps the model and says what to do."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest

from slideformer.errors import BadInput, RunFailed
from slideformer.train import hub
from slideformer.train.console import PlainConsole
from slideformer.train.hub import push, require_hub
from slideformer.train.trainer import train


@pytest.fixture
def refusing_hub(monkeypatch) -> Iterator[list[str]]:
    """A server on this machine that answers 403 to everything. Gives the paths it was asked for."""
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            text = b'{"error": "You may not write to somebody"}'
            self.send_response(403)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_name_that_no_repository_has_is_refused() -> None:
    with pytest.raises(BadInput, match=r"hub_model_id is 'a/b/c': .* write NAME or ORGANISATION/NAME"):
        require_hub("a/b/c")


def test_offline_and_no_token_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(BadInput, match="push_to_hub needs a token of the hub: log in with `hf auth login`"):
        require_hub("somebody/model")
    monkeypatch.setattr(hub, "get_token", lambda: "hf_x")
    require_hub("somebody/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="push_to_hub is true, and so is HF_HUB_OFFLINE"):
        require_hub("somebody/model")


def test_a_hub_that_refuses_is_quoted_with_the_way_to_try_again(refusing_hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(RunFailed) as caught:
        push(tmp_path, ["model.safetensors"], "somebody/model", private=True)
    assert refusing_hub == ["/api/repos/create"]
    message = str(caught.value)
    assert message.startswith(f"the model is complete in {tmp_path} but could not be pushed to somebody/model (")
    assert "403" in message
    assert message.endswith(f"slideformer export {tmp_path} --push-to-hub --hub-model-id somebody/model")


def test_a_hub_that_does_not_answer_is_a_failure_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunFailed, match=r"could not be pushed to somebody/model \(.*refused"):
        push(tmp_path, [], "somebody/model", private=True)


def test_a_run_whose_push_is_refused_has_its_model_all_the_same(
    refusing_hub, config_for, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    with pytest.raises(RunFailed, match="the model is complete in .* but could not be pushed to somebody/model"):
        train(config_for(max_steps=1, push_to_hub=True, hub_model_id="somebody/model"), PlainConsole(io.StringIO()))
    assert refusing_hub == ["/api/repos/create"]
    assert json.loads((tmp_path / "out/run.json").read_text())["status"] == "finished"
    assert (tmp_path / "out/model.safetensors").is_file()
