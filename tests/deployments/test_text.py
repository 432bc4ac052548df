import json
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.text import TextCodec
from tests.fakes import byte_tokenizer
from tests.limits import HANG_S
from workers.errors import ConfigurationError, InvalidRequestError

USER = {"role": "user", "content": "hi"}


def test_encoding_a_chat_writes_the_special_tokens_of_the_template_once(codec: TextCodec) -> None:
    ids = codec.encode_chat([USER]).tolist()
    assert ids.count(0) == 1
    assert codec.backend.decode(ids) == "user: hi\nassistant:"


def test_a_refusing_template_gives_its_reason(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match="odd") as refusal:
        codec.encode_chat([{"role": "odd", "content": ""}])
    assert refusal.value.param == "messages"


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        TextCodec(byte_tokenizer(chat_template=None)).encode_chat([USER])


def test_developer_messages_are_system_messages_to_templates_that_do_not_know_them(codec: TextCodec) -> None:
    ids = codec.encode_chat([{"role": "developer", "content": "be brief"}, USER]).tolist()
    assert codec.backend.decode(ids).startswith("system: be brief\n")


def test_a_codec_loads_from_a_folder_with_the_end_ids_of_all_its_files(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 8}))
    codec = TextCodec.load(str(tmp_path))
    assert codec.end_token_ids == {0, 7, 8, 9}
    assert codec.vocabulary_size == 257
    assert codec.backend.decode(codec.encode("日本").tolist()) == "日本"
    assert codec.encode_chat([USER]).tolist()[0] == 0


def test_a_folder_without_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        TextCodec.load(str(tmp_path))
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_loading_a_codec_does_not_import_torch(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys, deployments.http_app, deployments.text\n"
        f"codec = deployments.text.TextCodec.load({str(tmp_path)!r})\n"
        "codec.encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "assert not {'torch', 'ray', 'openai'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)
